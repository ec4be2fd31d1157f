"""A profiler that is taken down after each window, where that is known to end a process with CUDA graphs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from specmeter.runtime.deep_tool import CUDA, CannotProfile, Tool, teardown_fault


@pytest.mark.parametrize(
    ("value", "cuda", "refused"),
    [
        ("1", "12.4", True), ("1", "11.8", True), ("1", "12.6", False), ("1", "13.0", False), ("1", None, False),
        ("1", "12", True), ("1", "12.x", False), ("0", "12.4", False), (None, "12.4", False),
    ],
)  # fmt: skip
def test_the_teardown_is_refused_before_cuda_12_6_alone(
    monkeypatch: pytest.MonkeyPatch, value: str | None, cuda: str | None, refused: bool
) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if value is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", value)
    assert bool(teardown_fault(cuda)) == refused


def test_a_window_is_refused_with_the_reason_before_the_profiler_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch of CUDA 12.4 whose device is in use; there is no such torch here, so what is asked of it stands in."""
    kinds = SimpleNamespace(CUDA="cuda")
    autograd = SimpleNamespace(ProfilerActivity=kinds, _supported_activities=lambda: {"cuda"})
    torch: Any = SimpleNamespace(
        __version__="2.6.0", version=SimpleNamespace(cuda="12.4"), autograd=autograd,
        cuda=SimpleNamespace(is_initialized=lambda: True),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    with pytest.raises(CannotProfile, match=r"TEARDOWN_CUPTI=1 and CUDA 12\.4.*unset it"):
        Tool(CUDA)
