"""Accepted counts belong to the cycle that verified, by the engine's own number, also where they are read one later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specmeter.runtime import layout
from specmeter.trace import Trace, load_rings
from specmeter.trace.synthetic import make_plan, make_records, write_ring

SPAN, VALUE, MARK = layout.KIND_HOST_SPAN, layout.KIND_VALUE, layout.KIND_MARK
POINTS = [("cycle", "cycle", "none"), ("output", "span", "none"), ("accepted", "mark", "none")]
BOTH = ["cycle.iteration", "cycle.drafted", "output.iteration", "accepted.accepted"]
CYCLES, LENGTH, FIRST = 12, 1000, 100


def overlapped(folder: Path, values: list[str], lag: int, known: bool = True) -> Trace:
    """Cycle i (the engine's number 100 + i) accepts i drafts, told ``lag`` cycles later inside of ``output``."""
    plan = make_plan(POINTS, values)
    ids = plan["value_ids"]
    rows: list[tuple[int, ...]] = []
    for i in range(CYCLES):
        t0 = i * LENGTH
        rows.append((t0, t0 + 300, i + 1, 1, SPAN, 0, 0))
        rows.append((FIRST + i if known else 0, t0 + 300, i + 1, ids["cycle.iteration"], VALUE, 0, 0))
        rows.append((20, t0 + 300, i + 1, ids["cycle.drafted"], VALUE, 0, 0))
        of = i - lag
        if of >= 0:
            rows.append((of, t0 + 500, i + 1, ids["accepted.accepted"], VALUE, 0, 0))
            rows.append((t0 + 400, t0 + 600, i + 1, 2, SPAN, 0, 0))
            if "output.iteration" in ids:
                rows.append((FIRST + of, t0 + 600, i + 1, ids["output.iteration"], VALUE, 0, 0))
    folder.mkdir()
    ring = write_ring(folder / "1-1.ring", make_records(rows), rank=0)  # type: ignore[arg-type]
    return load_rings([ring], plan)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_engines_number_says_which_cycle_accepted(tmp_path: Path, lag: int) -> None:
    table = overlapped(tmp_path / "a", BOTH, lag).main.cycles
    told = table.accepted[: CYCLES - lag]
    assert told.tolist() == list(range(CYCLES - lag))
    assert np.all(table.accepted[CYCLES - lag :] == -1)
    assert table.accept[:, 0].tolist() == list(range(CYCLES - lag))


def test_without_the_number_where_results_are_read_the_time_of_reading_counts(tmp_path: Path) -> None:
    table = overlapped(tmp_path / "a", [v for v in BOTH if v != "output.iteration"], 1).main.cycles
    assert table.accepted.tolist() == [-1, *range(CYCLES - 1)]


def test_a_number_of_no_recorded_cycle_stays_where_it_was_read(tmp_path: Path) -> None:
    table = overlapped(tmp_path / "a", BOTH, 1, known=False).main.cycles
    assert table.accepted.tolist() == [-1, *range(CYCLES - 1)]
