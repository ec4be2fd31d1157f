"""The writers' places: nobody gets in between, threads and signal handlers included; values in their words."""

from __future__ import annotations

import ast
import dis
import marshal
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.runtime import layout, writers
from specmeter.runtime.probe import Recorder
from specmeter.runtime.ring import MARKS, Ring
from specmeter.runtime.swap import bind, find_functions
from specmeter.source.rewrite import rewrite_module
from specmeter.trace.ring import read_ring
from tests.support.toy import Mark, plan_points

POINT = {"id": 3, "name": "verify", "role": "leaf"}
WORD = 3 << layout.POINT_SHIFT


def recorder_of(folder: Path, capacity: int, first: int = 1) -> tuple[Recorder, Path, list[BaseException]]:
    path = folder / "7-1.ring"
    ring = Ring(str(path), capacity, bytes(32))
    ring.next_mark = first
    faults: list[BaseException] = []
    return Recorder(lambda: ring, lambda _point, error: faults.append(error)), path, faults


@pytest.mark.parametrize("name", ["end", "take", "values_end.end"])
def test_no_call_stands_between_a_place_and_its_mark(name: str) -> None:
    code: Any = writers.make_writers.__code__
    for part in name.split("."):
        code = next(const for const in code.co_consts if getattr(const, "co_name", "") == part)
    steps = list(dis.get_instructions(code))
    taken = [i for i, step in enumerate(steps) if step.opname == "STORE_DEREF" and step.argval == "place"]
    marked = [i for i, step in enumerate(steps) if step.opname == "STORE_DEREF" and step.argval == "mark"]
    assert len(taken) == len(marked) == 1
    read = max(i for i, step in enumerate(steps[: taken[0]]) if step.opname == "LOAD_DEREF" and step.argval == "place")
    between = {step.opname for step in steps[read : marked[0] + 1]}
    assert not [
        word for word in between if any(part in word for part in ("CALL", "BACKWARD", "RESUME", "YIELD", "SEND"))
    ]


@pytest.mark.parametrize("turns", [True, False])
def test_threads_and_a_signal_handler_never_share_a_place(
    turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if turns and not writers.TURNS_AT_CALLS:
        pytest.skip("this Python takes turns anywhere")
    monkeypatch.setattr(writers, "TURNS_AT_CALLS", turns)
    recorder, path, faults = recorder_of(tmp_path, 1 << 16)
    begin, end = recorder.pair({**POINT, "values": {"n": "return"}}, [["return", -1]], {"verify.n": 9})
    written = [0] * 4

    def work(index: int, calls: int) -> None:
        for number in range(calls):
            end(begin(), number, WORD)
            written[index] += 1

    def handler(*_: object) -> None:
        work(3, 1)

    before, interval = signal.signal(signal.SIGALRM, handler), sys.getswitchinterval()
    threads = [threading.Thread(target=work, args=(index, 4000)) for index in (1, 2)]
    try:
        sys.setswitchinterval(1e-6)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
        for thread in threads:
            thread.start()
        work(0, 4000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGALRM, before)
    found = read_ring(path)
    assert faults == [] and found.holes == 0 and found.overwritten == 0
    spans = found.records[found.records["kind"] == layout.KIND_HOST_SPAN]
    values = found.records[found.records["kind"] == layout.KIND_VALUE]
    assert len(spans) == len(values) == sum(written)
    assert (spans["point"] == 3).all() and (values["point"] == 9).all() and (spans["t1"] >= spans["t0"]).all()
    assert sorted(values["t0"].tolist()) == sorted([*range(4000)] * 3 + [0] * written[3])
    assert np.bincount(spans["lane"]).tolist() == np.bincount(values["lane"]).tolist()
    assert sorted(np.bincount(spans["lane"]).tolist())[:2] == [4000, 4000]


TWO_THREADS = """
import asyncio
def g(n): return n
def plain(): g(1); g(2); return g(3)
def inline(): return [(lambda: g(i))() for i in range(3)]
async def later(): return g(1)
def run(): plain(); inline(); asyncio.run(later())
"""


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("values", [{}, {"n": "return"}])
def test_spans_and_values_lie_in_their_threads_lane(
    turns: bool, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the frame's thread is handed over and where it is not known."""
    monkeypatch.setattr(writers, "TURNS_AT_CALLS", turns)
    recorder, path, faults = recorder_of(tmp_path, 256)
    points = plan_points(TWO_THREADS.encode(), "s.py", "s", [Mark("g", values=values)])
    content = marshal.loads(rewrite_module(ast.parse(TWO_THREADS), "s.py", "s", "", points)["blob"])
    module = types.ModuleType("s")
    exec(compile(TWO_THREADS, "s.py", "exec", dont_inherit=True), module.__dict__)
    roots = content["roots"]
    pairs = {p["id"]: recorder.pair(p, roots[p["id"]], {f"{p['name']}.n": 99}) for p in points}
    for entry in content["functions"]:
        for function in find_functions(module, entry["qualname"], entry["code"]):
            function.__code__ = bind(entry["code"], pairs, "s.py")
    module.run()
    thread = threading.Thread(target=module.run)
    thread.start()
    thread.join()
    module.run()
    found = read_ring(path).records
    assert faults == []
    lanes = [found["lane"][found["kind"] == kind].tolist() for kind in (layout.KIND_HOST_SPAN, layout.KIND_VALUE)]
    assert lanes[0] == [0] * 7 + [1] * 7 + [0] * 7
    assert lanes[1] == (lanes[0] if values else [])


@pytest.mark.parametrize("turns", [True, False])
def test_laps_and_marks_start_over(turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "TURNS_AT_CALLS", turns)
    recorder, path, faults = recorder_of(tmp_path, 64, first=MARKS - 127)
    _begin, end = recorder.pair(POINT, [], {})
    for number in range(63 + 64 + 5):
        end(number, None, WORD)
    found = read_ring(path)
    assert faults == [] and found.records["t0"].tolist() == list(range(70, 132))
    assert found.records["seq"].tolist() == [*range(MARKS - 57, MARKS), *range(1, 6)]


def test_what_does_not_fit_a_word_is_left_out_and_the_rest_is_written(tmp_path: Path) -> None:
    recorder, path, faults = recorder_of(tmp_path, 64)
    values = {"a": "return[0]", "b": "return[1]", "c": "return[2]", "d": "return[3]", "e": "return[4]"}
    _begin, end = recorder.pair(
        {**POINT, "values": values}, [["return", -1]], {f"verify.{n}": i + 20 for i, n in enumerate(values)}
    )
    end(time.perf_counter_ns(), [-5, 1 << 63, [7, -8], "no", True], WORD)
    found = read_ring(path).records
    found = found[found["kind"] == layout.KIND_VALUE]
    assert faults == []
    assert list(zip(found["point"].tolist(), found["t0"].tolist(), found["value"].tolist(), strict=True)) == [
        (20, -5, 0), (22, 7, 0), (22, -8, 1), (24, 1, 0),
    ]  # fmt: skip
    assert recorder.refused_values == {23: "NotAPlainValue: a builtins.str"}


@pytest.mark.parametrize("value", [layout.VALUE_MAX + 1, layout.VALUE_MIN - 1])
def test_a_value_that_a_record_cannot_hold_is_an_error_not_another_number(value: int, tmp_path: Path) -> None:
    recorder, path, _faults = recorder_of(tmp_path, 64)
    recorder.write(layout.KIND_MARK, 5, 1, 2, -3)
    with pytest.raises(ValueError, match=str(value)):
        recorder.write(layout.KIND_GRAPH_SPAN, 5, 1, 2, value)
    assert read_ring(path).records["value"].tolist() == [-3]
