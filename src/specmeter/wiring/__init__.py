"""Static and numeric check of a target model and its draft head: is the head fed what it was trained on?

Notation used throughout: N is the number of decoder layers of the target; H[0] is the output of its embedding, H[k] the
residual stream after decoder layer k-1 (Hugging Face calls it ``hidden_states[k]``), before the final norm.
"""
