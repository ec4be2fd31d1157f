"""Servers that run now, seen through their rings alone: what ``top`` and ``metrics`` show."""
