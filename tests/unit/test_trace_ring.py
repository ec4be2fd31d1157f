"""A ring gives every completed record or an error, never a wrong number."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.errors import SpecmeterError
from specmeter.runtime import layout
from specmeter.trace.ring import RECORD_DTYPE, RingCursor, read_ring
from specmeter.trace.synthetic import make_records, write_ring

SPAN = layout.KIND_HOST_SPAN


def rows(count: int) -> np.ndarray:
    return make_records([(10 * i, 10 * i + 5, i, 1 + i % 7, SPAN, 0, i) for i in range(count)])


def test_dtype_is_the_layout() -> None:
    packed = layout.RECORD.pack(1, 2, 3, 4, 5, 6, 7, 8)
    assert np.frombuffer(packed, RECORD_DTYPE)[0].tolist() == (1, 2, 3, 4, 5, 6, 7, 8)


def test_partly_filled_ring(tmp_path: Path) -> None:
    ring = read_ring(write_ring(tmp_path / "r.ring", rows(30), 100, pid=42, rank=3, host="h"))
    assert ring.records["t0"].tolist() == [10 * i for i in range(30)]
    assert (ring.overwritten, ring.holes, ring.header.pid, ring.header.rank, ring.header.host) == (0, 0, 42, 3, "h")
    assert len(read_ring(write_ring(tmp_path / "e.ring", rows(0), 8)).records) == 0


@pytest.mark.parametrize("written", [100, 101, 137, 200, 555])
def test_wrap_around_keeps_order_and_counts_what_is_lost(tmp_path: Path, written: int) -> None:
    ring = read_ring(write_ring(tmp_path / "r.ring", rows(written), 100))
    kept = 100 if written == 100 else 99
    assert ring.records["t0"].tolist() == [10 * i for i in range(written - kept, written)]
    assert ring.overwritten == written - kept


def test_a_slot_taken_but_not_completed_is_left_out(tmp_path: Path) -> None:
    path = write_ring(tmp_path / "r.ring", rows(50), 100)
    with path.open("r+b") as file:
        file.seek(layout.HEADER_SIZE + 20 * layout.RECORD_SIZE)
        file.write(bytes(layout.RECORD_SIZE))
    ring = read_ring(path)
    assert ring.holes == 1
    assert ring.records["t0"].tolist() == [10 * i for i in range(50) if i != 20]


def test_a_cursor_reads_on_and_counts_what_it_missed(tmp_path: Path) -> None:
    path = write_ring(tmp_path / "r.ring", rows(30), 100)
    cursor = RingCursor(path)
    assert cursor.poll(limit=20)["t0"].tolist() == [10 * i for i in range(20)]
    assert len(cursor.poll()) == 10 and len(cursor.poll()) == 0
    rewritten = write_ring(tmp_path / "new.ring", rows(300), 100).read_bytes()
    with path.open("r+b") as file:
        file.write(rewritten)
    assert len(cursor.poll()) == 0
    after = cursor.poll()
    assert cursor.lost > 0 and after["t0"].tolist() == [10 * i for i in range(30 + cursor.lost, 300)]


@pytest.mark.parametrize("cut", [0, 7, 4095, 4096, 4096 + 31, 4096 + 50 * 32, 4096 + 100 * 32 - 1])
def test_truncated_ring_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_ring(tmp_path / "r.ring", rows(50), 100)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SpecmeterError):
        read_ring(path)


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 90),
    st.sampled_from([16, 33, 90]),
    st.lists(st.tuples(st.integers(0, 4096 + 90 * 32), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_flipped_bytes_give_an_error_or_only_records_whose_marks_are_right(
    count: int, capacity: int, flips: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_ring(Path(folder) / "r.ring", rows(count), capacity)
        raw = bytearray(path.read_bytes())
        for at, mask in flips:
            raw[at % len(raw)] ^= mask
        path.write_bytes(raw)
        body = np.frombuffer(bytes(raw[layout.HEADER_SIZE :]), RECORD_DTYPE)
        try:
            ring = read_ring(path)
        except SpecmeterError:
            return
        for record in ring.records:
            slot = (int(record["seq"]) - 1) % capacity
            assert int(record["seq"]) > 0 and body[slot].tobytes() == record.tobytes()
        positions = ring.records["seq"].astype(np.int64)
        assert bool(np.all(np.diff(positions) > 0))
