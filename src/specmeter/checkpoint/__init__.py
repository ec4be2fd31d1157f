"""Checkpoint folders as files: config, tensor headers, numbers. Standard library only, for ``eagle`` and ``wiring``."""
