"""The parts of a session: frames, records as they are shipped, mirrors and their clocks."""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmeter.control.link import make_link
from specmeter.control.records import NewRecords
from specmeter.errors import SpecmeterError
from specmeter.hosts.far_rings import RATE, Shipper, pack, unpack
from specmeter.hosts.frames import Frames, StreamDamaged
from specmeter.hosts.mirror import Mirror, Shift
from specmeter.runtime import layout
from specmeter.runtime.probe import Recorder
from specmeter.runtime.ring import Ring, start_ticks
from specmeter.trace.ring import read_header, read_ring
from tests.support.children import until

DESCRIBED: dict[str, Any] = {"link": "l", "path": "/there", "plan": {"points": []}, "document": {"id": "l"}}


class Writer:
    """A real ring and a thread's way of writing to it."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.ring = Ring(str(path), capacity, b"\0" * 32)
        self.recorder = Recorder(lambda: self.ring, lambda point, error: None)
        self.count = 0

    def take(self) -> tuple[int, int]:
        """A free record's offset and its mark."""
        word, mark = self.recorder.take()
        return 8 * word, mark >> layout.SEQ_SHIFT

    def write(self, kind: int = layout.KIND_HOST_SPAN, whole: bool = True) -> None:
        """One record with the moments 1000 n and 1000 n + 10; not ``whole``: begun only."""
        at, mark = self.take()
        number = self.count
        self.count += 1
        fields = (1000 * number, 1000 * number + 10, number, 1, kind, 0, 0)
        layout.RECORD.pack_into(self.ring.buffer, at, *fields, mark if whole else 0)


def moments(data: bytes) -> list[int]:
    return [record[0] // 1000 for record in layout.RECORD.iter_unpack(data)]


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.binary())
def test_a_frame_comes_back_as_it_was(message: dict[str, Any], payload: bytes) -> None:
    stream = io.BytesIO()
    Frames(io.BytesIO(), stream).write(message, payload)
    frames = Frames(io.BytesIO(stream.getvalue()), io.BytesIO())
    assert frames.read() == (message, payload) and frames.read() is None
    assert frames.received == len(stream.getvalue())


@pytest.mark.parametrize("cut", [1, 11, 14, -1])
def test_a_stream_that_ends_within_a_frame_is_damaged_or_over(cut: int) -> None:
    stream = io.BytesIO()
    Frames(io.BytesIO(), stream).write({"a": 1}, b"payload")
    frames = Frames(io.BytesIO(stream.getvalue()[:cut]), io.BytesIO())
    try:
        assert frames.read() is None
    except StreamDamaged as damaged:
        assert cut < 12 and damaged.rest == stream.getvalue()[:cut]


@pytest.mark.parametrize("data", [b"Welcome to the host\n", b"\0spm" + b"\xff" * 8, b"\0spm\0\0\0\x01\0\0\0\0["])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(StreamDamaged):
        Frames(io.BytesIO(data), io.BytesIO()).read()


@given(st.binary(max_size=40 * layout.RECORD_SIZE))
def test_packing_loses_nothing(data: bytes) -> None:
    whole = data[: len(data) // layout.RECORD_SIZE * layout.RECORD_SIZE]
    assert unpack(pack(whole)) == whole


def test_only_new_records_are_taken(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", 64)
    for _ in range(5):
        writer.write()
    late, early = NewRecords(tmp_path / "r"), NewRecords(tmp_path / "r", from_start=True)
    assert late.take() == b"" and moments(early.take()) == [0, 1, 2, 3, 4]
    for _ in range(70):  # over the ring's end, which is taken in two pieces
        writer.write()
    first, second, none = late.take(), late.take(), late.take()
    taken = moments(first + second)
    assert first and second and none == b"" and late.lost > 0, "what is left comes at once, for it may be the last look"
    assert late.lost + len(taken) == 70 and taken == list(range(75 - len(taken), 75))
    writer.write()
    assert moments(late.take()) == [75]


def test_a_record_that_is_not_complete_is_waited_for(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", 64)
    reader = NewRecords(tmp_path / "r")
    for whole in (True, False, True, True):
        writer.write(whole=whole)
    assert moments(reader.take()) == [0] and reader.take() == b""
    assert moments(reader.take(pass_holes=True)) == [2, 3] and reader.lost == 0


@pytest.mark.parametrize("damage", [lambda h: h[:100], lambda h: b"X" + h[1:], lambda h: h[:8] + b"\xff" + h[9:]])
def test_a_file_that_is_no_ring_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    Writer(tmp_path / "r", 64)
    raw = (tmp_path / "r").read_bytes()
    (tmp_path / "bad").write_bytes(damage(raw))
    with pytest.raises(ValueError):
        NewRecords(tmp_path / "bad")
    assert (tmp_path / "bad").resolve() not in {path.resolve() for path in Path("/proc/self/fd").iterdir()}


def shipped(mirror: Mirror, writer: Writer, reader: NewRecords, lost: int = 0) -> None:
    mirror.take({"event": "records", "name": "7-8", "lost": lost}, pack(reader.take()))


def test_a_mirror_is_a_ring_like_the_one_there(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", 64)
    for _ in range(40):
        writer.write()  # before the session: not shipped
    reader, mirror = NewRecords(tmp_path / "r"), Mirror(DESCRIBED)
    try:
        mirror.take({"event": "ring", "name": "7-8"}, reader.header)
        for _ in range(9):
            for _ in range(10):
                writer.write()
            shipped(mirror, writer, reader)
            shipped_rest = reader.take()
            if shipped_rest:
                mirror.take({"event": "records", "name": "7-8", "lost": 0}, pack(shipped_rest))
        path = mirror.link.path / "7-8.ring"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(mirror.folder.stat().st_mode) == 0o700
        copy = read_ring(path)
        assert copy.holes == 0 and list(copy.records["t0"] // 1000)[-60:] == list(range(70, 130))
        shipped_folder = mirror.folder
        mirror.take({"event": "process", "name": "7-8", "alive": True}, b'{"pid": 7}')
        assert mirror.link.lives(7, 8) and not mirror.link.lives(7, 9)
    finally:
        mirror.close()
    assert not shipped_folder.exists()


def test_moments_are_put_on_another_clock_and_nothing_else(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", 64)
    reader, mirror = NewRecords(tmp_path / "r"), Mirror(DESCRIBED, Shift(5_000_000, 77))
    kinds = (
        layout.KIND_HOST_SPAN,
        layout.KIND_VALUE,
        layout.KIND_DEVICE_SPAN,
        layout.KIND_CLOCK_PAIR,
        layout.KIND_MARK,
    )
    try:
        for kind in kinds:
            writer.write(kind)
        mirror.take({"event": "ring", "name": "7-8"}, reader.header)
        shipped(mirror, writer, reader)
        copy, there = read_ring(mirror.folder / "7-8.ring").records, read_ring(tmp_path / "r").records
        moved = np.stack([copy["t0"] - there["t0"], copy["t1"] - there["t1"]], axis=1) // 5_000_000
        assert moved.tolist() == [[1, 1], [0, 1], [0, 0], [1, 0], [1, 1]], "values and device times stay"
        header, before = read_header(mirror.folder / "7-8.ring"), read_header(tmp_path / "r")
        assert header.perf_counter_ns == before.perf_counter_ns + 5_000_000
        assert header.time_ns - header.perf_counter_ns == 77, "one calendar for all hosts"
    finally:
        mirror.close()


def test_a_gap_leaves_a_hole_so_that_no_half_cycle_counts(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", 64)
    reader, mirror = NewRecords(tmp_path / "r"), Mirror(DESCRIBED)
    try:
        mirror.take({"event": "ring", "name": "7-8"}, reader.header)
        writer.write()
        shipped(mirror, writer, reader)
        writer.write()
        shipped(mirror, writer, reader, lost=3)
        assert read_ring(mirror.folder / "7-8.ring").holes == 1
    finally:
        mirror.close()


@pytest.mark.parametrize("name", ["../7-8", "7", "7-8/../x", "-", "٧-8", "7-8\0", "7" * 80 + "-8"])
def test_no_name_from_there_becomes_a_path(name: str) -> None:
    mirror = Mirror(DESCRIBED)
    try:
        with pytest.raises(SpecmeterError):
            mirror.take({"event": "process", "name": name, "alive": True}, b"{}")
        assert sorted(path.name for path in mirror.folder.iterdir()) == ["link.json", "plan.json"]
    finally:
        mirror.close()


def test_live_shipping_keeps_its_rate_and_the_end_brings_the_rest(tmp_path: Path) -> None:
    link = make_link({"points": []}, {}, link_id="l", base=tmp_path)
    me = f"{os.getpid()}-{start_ticks(os.getpid())}"
    (link.path / f"{me}.json").write_text("{}")
    sent: list[tuple[dict[str, Any], bytes]] = []
    shipper = Shipper(lambda message, payload: sent.append((message, payload)))
    began = time.monotonic()
    shipper.watch(link)
    try:
        writer = Writer(link.path / f"{me}.ring", 1 << 17)
        noise = os.urandom(120_000 * 8)  # does not pack, so that there is more than the rate allows
        for number in range(120_000):
            at, mark = writer.take()
            t0 = int.from_bytes(noise[8 * number : 8 * number + 8], "little", signed=True)
            layout.RECORD.pack_into(writer.ring.buffer, at, t0, t0, number, 1, layout.KIND_MARK, 0, 0, mark)
        time.sleep(2.5)
        until(lambda: any(message["event"] == "records" for message, _ in sent), "the first records")
    finally:
        shipper.close()
    live = [payload for message, payload in sent if message["event"] == "records"]
    largest = max(map(len, live))  # a piece that was begun within the rate goes whole
    assert 0 < sum(map(len, live)) <= RATE * (time.monotonic() - began + 1) + largest
    assert shipper.collect("l") == 0
    records = b"".join(unpack(payload) for message, payload in sent if message["event"] == "records")
    assert [record[2] for record in layout.RECORD.iter_unpack(records)] == list(range(120_000))


def test_a_link_that_is_watched_again_is_told_anew(tmp_path: Path) -> None:
    link = make_link({"points": []}, {}, link_id="l", base=tmp_path)
    me = f"{os.getpid()}-{start_ticks(os.getpid())}"
    (link.path / f"{me}.json").write_text("{}")
    writer = Writer(link.path / f"{me}.ring", 64)
    sent: list[dict[str, Any]] = []
    shipper = Shipper(lambda message, payload: sent.append(message))
    try:
        for _ in range(2):
            sent.clear()
            shipper.watch(link)
            for _ in range(100):  # more than the ring holds: some are lost on the way
                writer.write()
            assert shipper.collect("l") > 0
            assert {message["event"] for message in sent} == {"process", "ring", "records"}
            assert all(message["lost"] >= 0 for message in sent if message["event"] == "records")
            shipper.forget("l")
    finally:
        shipper.close()
