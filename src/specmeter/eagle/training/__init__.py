"""Training of an EAGLE-3 head: self-generated data, unrolled training, evaluation of chain acceptance.

Source of the architecture and of the training-time test: EAGLE-3, arXiv 2503.01840. The recipe is in docs/training.md.
"""
