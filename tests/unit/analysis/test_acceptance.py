"""Accept length of a batch, from counts by sequence and from one number a cycle for all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.acceptance import Acceptance, acceptance
from specmeter.runtime import layout
from specmeter.trace import load_rings
from specmeter.trace.synthetic import make_plan, make_records, write_ring

SPAN, VALUE = layout.KIND_HOST_SPAN, layout.KIND_VALUE


def of(folder: Path, counts: list[list[int]], batch: list[int]) -> Acceptance | None:
    """Acceptance of cycles of 3 steps in which the engine gave these accepted counts."""
    plan = make_plan([("cycle", "cycle", "none")], ["cycle.batch", "cycle.steps", "cycle.accepted"])
    ids, rows = plan["value_ids"], []
    for i, (each, size) in enumerate(zip(counts, batch, strict=True)):
        t0 = i * 1000
        rows.append((t0, t0 + 300, i + 1, 1, SPAN, 0, 0))
        rows.append((size, t0 + 300, i + 1, ids["cycle.batch"], VALUE, 0, 0))
        rows.append((3, t0 + 300, i + 1, ids["cycle.steps"], VALUE, 0, 0))
        rows += [(one, t0 + 300, i + 1, ids["cycle.accepted"], VALUE, 0, 0) for one in each]
    rank = load_rings([write_ring(folder / "1-1.ring", make_records(rows), rank=0)], plan).main
    return acceptance(rank, np.ones(len(rank.cycles), bool))


def test_one_number_for_a_batch_is_shared_among_its_sequences(tmp_path: Path) -> None:
    """SGLang's number: 8 sequences that keep 12 drafts together have an accept length of 2.5, not of 13."""
    found = of(tmp_path, [[12], [12], [12]], [8, 8, 8])
    assert found is not None and found.length.point == pytest.approx(2.5)
    assert found.sequences == 24 and found.positions == ()


def test_cycles_of_one_sequence_tell_the_positions_of_a_run_that_has_both(tmp_path: Path) -> None:
    found = of(tmp_path, [[12], [1], [3]], [8, 1, 1])
    assert found is not None and found.length.point == pytest.approx((12 + 1 + 3 + 10) / 10)
    assert [p.cumulative for p in found.positions] == [1.0, 0.5, 0.5] and found.positions[0].reached == 2


def test_numbers_by_sequence_count_one_each_also_where_one_of_a_batch_drafted_none(tmp_path: Path) -> None:
    found = of(tmp_path, [[1, 3], [2]], [2, 2])
    assert found is not None and found.length.point == pytest.approx(3.0) and found.sequences == 3
    assert [p.cumulative for p in found.positions] == pytest.approx([1.0, 2 / 3, 1 / 3])
