"""The straggler among ranks: whoever works longest outside the collectives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specmeter.analysis.ranks import RankRow, straggler


def row(rank: int, own_ms: float, cycle_ms: float = 100.0) -> RankRow:
    return RankRow("h", rank, cycle_ms, 9, {}, {"wait.all_reduce": cycle_ms - own_ms}, 60.0, own_ms)


@given(st.lists(st.floats(1, 99), min_size=2, max_size=8, unique=True))
def test_the_straggler_is_the_rank_that_waits_least(own: list[float]) -> None:
    found = straggler([row(rank, ms) for rank, ms in enumerate(own)])
    assert found is not None and found["rank"] == own.index(max(own))
    others = [ms for ms in own if ms != max(own)]
    assert abs(found["behind_ms"] - (max(own) - sum(others) / len(others))) < 1e-6


def test_ranks_without_collectives_have_no_straggler() -> None:
    silent = RankRow("h", 0, 10.0, 9, {}, {}, 0.0, 10.0)
    assert straggler([silent, silent]) is None
    assert straggler([row(0, 5.0), silent]) is None
