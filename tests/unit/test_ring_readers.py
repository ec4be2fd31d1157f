"""Readers that follow a ring while it is written: over laps and the end of the 32-bit marks, never a wrong record."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.control.records import NewRecords
from specmeter.live.server import LiveServer
from specmeter.live.share import Window
from specmeter.live.tail import Tail
from specmeter.runtime import layout
from specmeter.runtime.probe import Recorder
from specmeter.runtime.ring import MARKS, Ring
from specmeter.trace import ring as ring_file
from specmeter.trace.ring import RECORD_DTYPE, RingCursor, read_ring
from specmeter.trace.synthetic import make_plan
from tests.support.growing import GrowingRing

CAPACITY = 64
Look = Callable[[], list[int]]
STEPS = st.lists(st.tuples(st.integers(0, CAPACITY // 4), st.booleans()), min_size=1, max_size=30)


class Writer:
    """A process's recorder of its own ring, whose spans are numbered: t0 = t1 = number, cycle = 0."""

    def __init__(self, folder: Path, first: int = 1) -> None:
        self.path = folder / "7-1.ring"
        self.path.unlink(missing_ok=True)
        self.ring = Ring(str(self.path), CAPACITY, bytes(32))
        self.ring.next_mark = first
        self.faults: list[BaseException] = []
        self.recorder = Recorder(lambda: self.ring, lambda _point, error: self.faults.append(error))
        self.end = self.recorder._end
        self.number = 0

    def write(self, count: int) -> None:
        """``count`` more spans."""
        for _ in range(count):
            self.number += 1
            self.end(self.number, None, 1 << layout.POINT_SHIFT)
        assert self.faults == []

    def close(self) -> None:
        self.ring.close()


def numbers(records: bytes | np.ndarray) -> list[int]:
    found = np.frombuffer(records, RECORD_DTYPE) if isinstance(records, bytes) else records
    assert (found["kind"] == layout.KIND_HOST_SPAN).all() and (found["point"] == 1).all()
    return [int(t0) for t0 in found["t0"]]


def following(path: Path) -> dict[str, tuple[Look, Callable[[], int]]]:
    """The three readers, each with what it gives at a look and how many records it has said are lost."""
    tail, cursor, new = Tail(path), RingCursor(path), NewRecords(path)
    cursor.next_position = tail.next_position
    return {
        "tail": (lambda: numbers(tail.new()), lambda: tail.lost),
        "cursor": (lambda: numbers(cursor.poll()), lambda: cursor.lost),
        "records": (lambda: numbers(new.take()), lambda: new.lost),
    }


def until_quiet(look: Look) -> list[int]:
    found: list[int] = []
    for _ in range(4):
        found += look()
    return found


@pytest.mark.parametrize("name", ["tail", "cursor", "records"])
@pytest.mark.parametrize("first", [1, MARKS - 2 * CAPACITY + 1], ids=["first laps", "marks over 32 bits"])
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_a_reader_that_keeps_up_gets_every_record(
    tmp_path_factory: pytest.TempPathFactory, name: str, first: int, steps: list[tuple[int, bool]]
) -> None:
    writer = Writer(tmp_path_factory.mktemp("ring"), first)
    writer.write(1 if first == 1 else CAPACITY + 1)  # a place in each slot but the first epoch's
    seen = writer.number
    look, lost = following(writer.path)[name]
    got: list[int] = []
    for count, wait in steps:
        writer.write(count)
        if not wait or writer.number - seen - len(got) > CAPACITY // 2:
            got += until_quiet(look)
    got += until_quiet(look)
    assert got == list(range(seen + 1, writer.number + 1)) and lost() == 0
    writer.close()


@pytest.mark.parametrize("name", ["tail", "cursor", "records"])
@pytest.mark.parametrize("start", [3, CAPACITY - 1, CAPACITY, 2 * CAPACITY - 1, 2 * CAPACITY + 5, 5 * CAPACITY])
def test_a_reader_that_was_overtaken_goes_on_with_what_is_there(tmp_path: Path, name: str, start: int) -> None:
    writer = Writer(tmp_path, MARKS - 2 * CAPACITY + 1)
    writer.write(start)
    look, lost = following(writer.path)[name]
    writer.write(3 * CAPACITY + 7)
    got = until_quiet(look)
    assert got == sorted(set(got)) and got[-1:] == [writer.number] and len(got) >= CAPACITY // 2
    # The one place whose mark would be 0 may count as a lost record.
    assert len(got) + lost() - (writer.number - start) in (0, 1)
    writer.write(5)
    assert until_quiet(look) == list(range(writer.number - 4, writer.number + 1))
    writer.close()


@pytest.mark.parametrize("past", [0, 1, 2, CAPACITY // 2, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY])
def test_a_file_with_marks_from_before_and_after_their_end_is_read_whole(tmp_path: Path, past: int) -> None:
    writer = Writer(tmp_path, MARKS - 2 * CAPACITY + 1)
    writer.write(2 * CAPACITY - 1 + past)
    got = numbers(read_ring(writer.path).records)
    assert got == list(range(got[0], writer.number + 1)) and len(got) >= CAPACITY - 2
    writer.close()


def test_a_record_completed_while_it_is_copied_is_not_given_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    writer.write(CAPACITY)
    new, cursor = NewRecords(writer.path), RingCursor(writer.path)
    real, written = os.pread, []

    def torn(handle: int, count: int, at: int) -> bytes:
        before = real(handle, count, at)
        if not written:  # the writer completes a record between the copy of its first half and of its second
            written.append(writer.write(1))
        return before[:16] + real(handle, count, at)[16:]

    class Torn:
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                return slots[key].copy()
            before = slots[key].copy()
            writer.write(1)
            after = slots[key].copy()
            after["t0"] = before["t0"]
            return after

    monkeypatch.setattr(os, "pread", torn)
    assert numbers(new.take()) + numbers(new.take()) == [CAPACITY + 1]
    monkeypatch.undo()
    slots, cursor.next_position = cursor._slots, CAPACITY + 1
    cursor._slots = Torn()  # type: ignore[assignment]
    assert numbers(cursor.poll()) == []
    cursor._slots = slots
    assert numbers(cursor.poll()) == [CAPACITY + 2]
    writer.close()


def test_marks_end_while_other_threads_write(tmp_path: Path) -> None:
    writer = Writer(tmp_path, MARKS - CAPACITY + 1)
    writer.write(CAPACITY - 1)

    def other(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "recover":
            sys.setprofile(None)
            writer.recorder.take()

    sys.setprofile(other)
    writer.write(1)  # no fault: the point stays in
    assert sys.getprofile() is None
    assert numbers(read_ring(writer.path).records)[-1] == writer.number
    writer.close()


def test_records_overwritten_while_a_ring_is_read_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path)
    writer.write(CAPACITY + 20)
    real = ring_file._complete

    def and_more(*arguments: Any) -> Any:
        found = real(*arguments)
        writer.write(30)
        return found

    monkeypatch.setattr(ring_file, "_complete", and_more)
    ring = read_ring(writer.path)
    assert numbers(ring.records) == list(range(20 + 30 + 1, CAPACITY + 20 + 1))
    assert (ring.first_position, ring.overwritten, ring.holes) == (50, 50, 0)
    writer.close()


def test_a_ring_that_is_made_while_one_looks_is_read_from_its_first_record(tmp_path: Path) -> None:
    grown = GrowingRing(tmp_path / "links", make_plan([("cycle", "cycle", "none")]))
    later = grown.path.rename(tmp_path / "later")
    window, server = Window(grown.link), LiveServer(grown.link, held=True)
    later.rename(grown.path)
    mark = (5, 5, 0, layout.POINT_SAMPLING, layout.KIND_MARK, 0, 0)
    grown.add([mark, (10, 20, 1, 1, layout.KIND_HOST_SPAN, 0, 0)])
    window.poll()
    server.look()
    server._read(server._sources[grown.path])
    for records in (window._records[grown.path], server._sources[grown.path].pending):
        assert records["t0"].tolist() == [5, 10]
