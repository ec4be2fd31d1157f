"""NVTX ranges: a push and a pop for every span, whatever the call does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from specmeter.runtime.nvtx import Ranges


class Nvtx(ModuleType):
    """``torch.cuda.nvtx`` as torch 2.11 has it: ``range_push(msg)`` and ``range_pop()`` give the zero-based depth.

    https://docs.pytorch.org/docs/2.11/generated/torch.cuda.nvtx.range_push.html
    """

    def __init__(self) -> None:
        super().__init__("torch.cuda.nvtx")
        self.stacks: dict[int, list[str]] = {}
        self.log: list[str] = []

    def range_push(self, msg: str) -> int:
        stack = self.stacks.setdefault(threading.get_ident(), [])
        stack.append(msg)
        self.log.append(f"+{msg}")
        return len(stack) - 1

    def range_pop(self) -> int:
        stack = self.stacks.setdefault(threading.get_ident(), [])
        self.log.append(f"-{stack.pop()}")  # a pop too many fails the test
        return len(stack)

    @property
    def open(self) -> int:
        return sum(map(len, self.stacks.values()))


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvtx]:
    """A torch with CUDA in this process."""
    fake, torch = Nvtx(), ModuleType("torch")
    torch.version = ModuleType("torch.version")  # type: ignore[attr-defined]
    torch.version.cuda = "13.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", fake)
    yield fake


def span(ranges: Ranges, name: str) -> Callable[..., Any]:
    """``end(begin(), f(), id)``, as the rewritten code has it."""
    ended: list[int] = []

    def plain_end(t0: int, result: Any, id: int, *roots: Any) -> Any:
        assert type(t0) is int, "the recorder gets what its own begin gave"
        ended.append(id)
        return result

    begin, end = ranges.pair(name, time.perf_counter_ns, plain_end)
    return lambda call: end(begin(), call(), 7)


def fails() -> None:
    raise KeyError("the server's own")


def test_ranges_nest_as_the_spans_do_and_results_pass(nvtx: Nvtx) -> None:
    ranges = Ranges()
    outer, inner = span(ranges, "verify"), span(ranges, "verify.forward")
    assert outer(lambda: inner(lambda: 3) + inner(lambda: 4)) == 7
    assert nvtx.log == [
        "+verify", "+verify.forward", "-verify.forward", "+verify.forward", "-verify.forward", "-verify",
    ]  # fmt: skip
    assert ranges.describe() == {"reason": "", "pushed": 3}


def test_a_call_that_raises_has_its_range_popped_as_the_exception_passes(nvtx: Nvtx) -> None:
    ranges = Ranges()
    outer, inner = span(ranges, "outer"), span(ranges, "inner")
    seen: list[int] = []

    def caught() -> None:
        try:
            inner(fails)
        except KeyError:
            seen.append(nvtx.open)
        inner(lambda: None)

    outer(caught)
    assert seen == [1], "only the outer one is open where the exception is caught"
    with pytest.raises(KeyError):
        outer(lambda: inner(fails))
    assert nvtx.open == 0 and ranges.reason == ""


def test_a_range_that_ends_out_of_order_closes_those_inside(nvtx: Nvtx) -> None:
    ranges = Ranges()
    first, second = (ranges.pair(name, time.perf_counter_ns, lambda t0, result, id: result) for name in ("a", "b"))
    one, two = first[0](), second[0]()
    assert first[1](one, 1, 1) == 1 and nvtx.open == 0
    assert second[1](two, 2, 2) == 2 and nvtx.open == 0
    assert nvtx.log == ["+a", "+b", "-b", "-a"]


def test_each_thread_has_its_own(nvtx: Nvtx) -> None:
    ranges = Ranges()
    work = span(ranges, "work")
    both = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(lambda: both.wait(60),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert nvtx.open == 0 and len(nvtx.log) == 4


def test_a_token_that_dies_on_another_thread_pops_nothing_there(nvtx: Nvtx) -> None:
    ranges = Ranges()
    begin, _end = ranges.pair("lost", time.perf_counter_ns, lambda t0, result, id: result)
    held = [begin()]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert nvtx.log == ["+lost"], "left for the range around it"


def test_ranges_begin_once_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "torch.cuda.nvtx", raising=False)
    ranges = Ranges()
    work = span(ranges, "work")
    assert work(lambda: 1) == 1 and ranges.reason == "torch is not imported"
    fake, torch = Nvtx(), ModuleType("torch")
    torch.version = ModuleType("torch.version")  # type: ignore[attr-defined]
    torch.version.cuda = "13.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", fake)
    assert work(lambda: 2) == 2 and fake.log == ["+work", "-work"] and ranges.reason == ""


def test_a_build_without_cuda_is_said(nvtx: Nvtx) -> None:
    sys.modules["torch"].version.cuda = None
    ranges = Ranges()
    assert span(ranges, "work")(lambda: 5) == 5
    assert "without CUDA" in ranges.reason and nvtx.log == []


@pytest.mark.parametrize("broken", ["range_push", "range_pop"])
def test_a_failure_turns_ranges_off_with_the_reason(nvtx: Nvtx, broken: str) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    setattr(nvtx, broken, refuse)
    ranges = Ranges()
    work = span(ranges, "work")
    assert [work(lambda: 1), work(lambda: 2)] == [1, 2]
    assert "not installed" in ranges.reason and nvtx.log == (["+work"] if broken == "range_pop" else [])


def test_what_a_signal_handler_raises_in_begin_passes_and_the_range_is_popped(nvtx: Nvtx) -> None:
    ranges = Ranges()

    def interrupted() -> int:
        raise InterruptedError

    begin, _end = ranges.pair("work", interrupted, lambda t0, result, id: result)
    with pytest.raises(InterruptedError):
        begin()
    assert nvtx.log == ["+work", "-work"]
