"""Prompts that several benchmarks share, so that their figures are of the same texts."""

from __future__ import annotations

FORM = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""SmolLM2's chat form of one question, without a system's line."""

QUESTIONS = [
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain recursion to a child.",
    "List five uses of a paperclip.",
    "Give me a recipe for pancakes.",
    "Write a Python function that reverses a list.",
    "What did the Romans eat?",
    "Describe how a bicycle stays upright.",
]
"""What decoding speed is measured on."""

MORE_QUESTIONS = [
    *QUESTIONS,
    "What is the difference between weather and climate?",
    "Tell me a story about a lighthouse keeper.",
]

PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three differences between a frog and a toad.",
    "Summarize the water cycle in one paragraph.",
    "Write a short letter that asks a landlord to repair a window.",
    "What is 17 times 23? Show the steps.",
]
"""What a server under probes is asked."""
