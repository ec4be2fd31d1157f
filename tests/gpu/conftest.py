"""Tests on a real NVIDIA GPU: `PYTHONPATH=src python3 -m pytest tests/gpu -q` with torch, numpy and pytest alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["SPECMETER_STAMPS_COST"] = "1"  # off in servers until these tests have passed on a card
sys.path.insert(0, str(Path(__file__).parents[2]))  # tests.support, without an installed project

try:
    import torch

    REASON = "" if torch.cuda.is_available() else "torch sees no CUDA device"
except ImportError:
    REASON = "torch is not installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, where there is no GPU."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if REASON:
                item.add_marker(pytest.mark.skip(reason=REASON))
