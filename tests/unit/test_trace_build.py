"""Rings with known contents must come out as exactly those cycles, phases and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.analysis.rank_arrivals import rank_skew
from specmeter.errors import SpecmeterError
from specmeter.runtime import layout
from specmeter.trace import Request, load_rings
from specmeter.trace import cycles as c
from specmeter.trace.ring import Records
from specmeter.trace.spans import nest
from specmeter.trace.synthetic import make_plan, make_records, repeat_cycle, write_ring
from specmeter.trace.tables import cycle_columns, shared_ranks, span_columns

POINTS = [
    ("cycle", "cycle", "none"),
    ("verify.forward", "leaf", "none"),
    ("other.step", "span", "none"),
    ("draft.forward", "leaf", "loop"),
    ("kv.free", "overlapped", "none"),
    ("prefill", "mark", "none"),
    ("schedule.output", "leaf", "none"),
]
VALUES = ["cycle.drafted", "cycle.accepted", "cycle.steps"]
PLAN = make_plan(POINTS, VALUES)
CYCLE_ID, VERIFY, STEP, DRAFT, FREE, PREFILL, OUTPUT, DRAFTED, ACCEPTED, STEPS = range(1, 11)
SPAN, MARK, VALUE = layout.KIND_HOST_SPAN, layout.KIND_MARK, layout.KIND_VALUE


def one_cycle(accepted: int = 2) -> Records:
    """Cycle of 100 ns: step [10, 60] with two draft calls, verify [60, 90], output after it, values."""
    return make_records(
        [
            (1015, 1020, 0, DRAFT, SPAN, 0, 0),
            (1030, 1045, 0, DRAFT, SPAN, 0, 0),
            (1010, 1060, 0, STEP, SPAN, 0, 0),
            (1050, 1070, 0, FREE, SPAN, 1, 0),
            (1060, 1090, 0, VERIFY, SPAN, 0, 0),
            (1000, 1095, 0, CYCLE_ID, SPAN, 0, 0),
            (3, 1095, 0, DRAFTED, VALUE, 0, 0),
            (accepted, 1095, 0, ACCEPTED, VALUE, 0, 0),
            (3, 1095, 0, STEPS, VALUE, 0, 0),
            (1096, 1099, 0, OUTPUT, SPAN, 0, 0),
        ]
    )


def load(tmp_path: Path, *rings: Records, plan: dict[str, Any] = PLAN, requests: Any = (), **facts: Any) -> Any:
    paths = [write_ring(tmp_path / f"{i}-1.ring", r, pid=i, **facts) for i, r in enumerate(rings)]
    return load_rings(paths, plan, requests)


def test_self_times_calls_and_values_are_exact(tmp_path: Path) -> None:
    trace = load(tmp_path, repeat_cycle(one_cycle(), 5, 100))
    rank, names = trace.main, trace.index.names
    row = dict(zip(names, rank.self_ns[2].tolist(), strict=True))
    assert row == {
        "cycle": 95 - 50 - 30,
        "verify.forward": 30,
        "other.step": 50 - 5 - 15,
        "draft.forward": 20,
        "kv.free": 0,
        "prefill": 0,
        "schedule.output": 3,
    }
    assert rank.outside_ns[2][names.index("kv.free")] == 20
    assert rank.calls[2].tolist() == [1, 1, 1, 2, 0, 0, 1]
    assert rank.steps_ns["draft.forward"][2].tolist() == [5, 15]
    table = rank.cycles
    assert table.dur_ns.tolist() == [100, 100, 100, 100, 0]
    assert (table.drafted[1], table.accepted[1], table.steps[1], table.sampled[1], table.batch[1]) == (3, 2, 3, 3, 1)
    assert [c.DROPS[d] for d in table.drop] == [c.DROPS[c.ARMING], "", "", "", c.DROPS[c.OPEN]]


def test_prefill_between_cycles_ends_one_request_and_begins_the_next(tmp_path: Path) -> None:
    first, second = repeat_cycle(one_cycle(), 4, 100), repeat_cycle(one_cycle(), 4, 100)
    second["t1"] += 1000
    second["t0"][second["kind"] != VALUE] += 1000
    prefill = make_records([(1500, 1900, 0, PREFILL, SPAN, 0, 0)])
    table = load(tmp_path, np.concatenate([first, prefill, second])).main.cycles
    assert table.drop.tolist() == [c.ARMING, 0, 0, c.LAST, c.FIRST, 0, 0, c.OPEN]
    assert c.KINDS[table.kind[4]] == "after-prefill"


def test_idle_without_any_mark_is_no_cycle_time(tmp_path: Path) -> None:
    records = repeat_cycle(one_cycle(), 8, 100)
    late = records["cycle"] > 4
    records["t1"][late] += 5000
    records["t0"][late & (records["kind"] != VALUE)] += 5000
    table = load(tmp_path, records).main.cycles
    assert table.drop.tolist() == [c.ARMING, 0, 0, c.LAST, c.FIRST, 0, 0, c.OPEN]


def test_requests_give_setting_and_ends(tmp_path: Path) -> None:
    requests = [
        Request("a", "p0", "k3", 0, 900, 1001, 1399, 5, 9),
        Request("b", "p1", "baseline", 1, 1399, 1400, 1799, 5, 9),
    ]
    table = load(tmp_path, repeat_cycle(one_cycle(), 10, 100), requests=requests).main.cycles
    assert table.request.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, -1, -1]
    assert table.drop.tolist() == [c.ARMING, 0, 0, c.LAST, c.FIRST, 0, 0, c.LAST, c.OUTSIDE, c.OPEN]


def test_marks_say_which_cycles_ran_the_original_code(tmp_path: Path) -> None:
    marks = make_records([(1199, 1199, 0, layout.POINT_SAMPLING, MARK, 0, 0)])
    back = make_records([(1400, 1400, 0, layout.POINT_SAMPLING, MARK, 0, 2)])
    again = make_records([(1500, 1500, 0, layout.POINT_SAMPLING, MARK, 0, 1)])
    r = repeat_cycle(one_cycle(), 8, 100)
    table = load(tmp_path, np.concatenate([r[:20], marks, r[20:40], back, r[40:50], again, r[50:]])).main.cycles
    assert table.probed.tolist() == [1, 1, 0, 0, 2, 1, 1, 1]
    assert table.drop[4] == c.PARTLY_PROBED


def test_a_worker_process_is_merged_into_the_cores_timeline(tmp_path: Path) -> None:
    plan = make_plan(
        [
            ("cycle.core", "cycle", "none"), ("schedule.step", "leaf", "none"), ("wait.rpc", "wait", "none"),
            ("cycle", "cycle", "none"), ("verify.forward", "leaf", "none"), ("schedule.ipc", "leaf", "none"),
        ]
    )  # fmt: skip
    core = make_records(
        [
            (1000, 1010, 0, 2, SPAN, 0, 0),
            (1010, 1080, 0, 3, SPAN, 0, 0),
            (1080, 1095, 0, 2, SPAN, 0, 0),
            (1000, 1095, 0, 1, SPAN, 0, 0),
        ]
    )
    # Waits for the core, works [1015, 1075] with verify [1020, 1070], and still sends until 1085, beside the core.
    worker = make_records(
        [
            (985, 1015, 0, 3, SPAN, 0, 0),
            (1020, 1070, 0, 5, SPAN, 0, 0),
            (1015, 1075, 0, 4, SPAN, 0, 0),
            (1075, 1085, 0, 6, SPAN, 0, 0),
        ]
    )
    trace = load(tmp_path, repeat_cycle(core, 5, 100), repeat_cycle(worker, 5, 100), plan=plan)
    row = dict(zip(trace.index.names, trace.main.self_ns[2].tolist(), strict=True))
    assert row == {
        "cycle.core": 0,
        "schedule.step": 25,
        "wait.rpc": 70 - 60 - 5,
        "cycle": 10,
        "verify.forward": 50,
        "schedule.ipc": 5,
    }
    assert len(trace.ranks) == 1


def test_sites_of_one_name_in_a_loop_number_their_steps_each(tmp_path: Path) -> None:
    plan = make_plan(
        [
            ("cycle", "cycle", "none"),
            ("kv.meta", "leaf", "loop"),
            ("kv.meta", "leaf", "loop"),
            ("kv.meta", "leaf", "none"),
        ]
    )
    cycle = make_records(
        [
            (1001, 1002, 0, 4, SPAN, 0, 0),
            (1010, 1013, 0, 2, SPAN, 0, 0),
            (1020, 1025, 0, 3, SPAN, 0, 0),
            (1030, 1034, 0, 2, SPAN, 0, 0),
            (1040, 1046, 0, 3, SPAN, 0, 0),
            (1000, 1095, 0, 1, SPAN, 0, 0),
        ]
    )
    rank = load(tmp_path, repeat_cycle(cycle, 4, 100), plan=plan).main
    assert rank.steps_ns["kv.meta"].tolist()[2] == [3 + 5, 4 + 6]


def test_a_cycle_is_clean_only_where_both_processes_agree(tmp_path: Path) -> None:
    plan = make_plan([("cycle.core", "cycle", "none"), ("cycle", "cycle", "none"), ("verify.forward", "leaf", "none")])
    core = repeat_cycle(make_records([(1000, 1095, 0, 1, SPAN, 0, 0)]), 6, 100)
    worker = repeat_cycle(make_records([(1020, 1070, 0, 3, SPAN, 0, 0), (1015, 1075, 0, 2, SPAN, 0, 0)]), 6, 100)

    def mark(at: int, state: int) -> Records:
        return make_records([(at, at, 0, layout.POINT_SAMPLING, MARK, 0, state)])

    core = np.concatenate([core[:1], mark(1099, 0), core[1:3], mark(1300, 1), core[3:]])
    worker = np.concatenate([worker[:4], mark(1214, 0), worker[4:8], mark(1414, 1), worker[8:]])
    table = load(tmp_path, core, worker, plan=plan).main.cycles
    assert table.probed.tolist() == [1, 2, 0, 2, 1, 1]
    assert table.drawn.tolist() == [False, True, True, True, True, True]


CORES = make_plan([("cycle.core", "cycle", "none"), ("cycle", "cycle", "none"), ("verify.forward", "leaf", "none")])


def two_cores(folder: Path, ranks: tuple[int, ...] = (0, 1, 0, 1), parents: tuple[int, ...] = (10, 10, 20, 20)) -> Any:
    """Two engine cores (processes 10 and 20) of unknown rank, and four workers, each with its rank and its parent."""
    core = make_records([(1000, 1095, 0, 1, SPAN, 0, 0)])
    paths = [write_ring(folder / f"{pid}-1.ring", repeat_cycle(core, 5 + pid // 10, 100), pid=pid) for pid in (10, 20)]
    for at, (rank, parent) in enumerate(zip(ranks, parents, strict=True)):
        pid = parent + 1 + at if parent else 30 + at
        verify = (1020, 1050 + pid, 0, 3, SPAN, 0, 0)
        worker = make_records([verify, (1015, 1055 + pid, 0, 2, SPAN, 0, 0)])
        paths.append(write_ring(folder / f"{pid}-1.ring", repeat_cycle(worker, 7, 100), pid=pid, rank=rank))
        if parent:
            (folder / f"{pid}-1.json").write_text(f'{{"ppid": {parent}}}')
    return load_rings(paths, CORES)


def test_workers_of_several_cores_are_joined_to_the_process_that_started_them(tmp_path: Path) -> None:
    trace = two_cores(tmp_path)
    verify = trace.index.names.index("verify.forward")
    found = [(rank.pid, rank.rank, int(rank.self_ns[2, verify])) for rank in trace.ranks]
    # vLLM's data parallel 2 x tensor parallel 2: the second core's workers count from 0 again.
    assert sorted(found) == [(10, 2, 41), (10, 3, 42), (20, 0, 53), (20, 1, 54)]
    assert (
        len(trace.warnings) == 2
        and "process 23 on host, process 11 on host say that they are rank 0" in (trace.warnings[0])
    )


def test_global_ranks_of_several_cores_stay(tmp_path: Path) -> None:
    trace = two_cores(tmp_path, (0, 1, 2, 3))
    assert [(rank.pid, rank.rank) for rank in trace.ranks] == [(10, 0), (10, 1), (20, 2), (20, 3)]
    assert trace.warnings == ()


def test_a_starter_between_core_and_worker_is_passed(tmp_path: Path) -> None:
    for starter, core in ((40, 10), (50, 20)):
        (tmp_path / f"{starter}-1.json").write_text(f'{{"ppid": {core}}}')
    trace = two_cores(tmp_path, (0, 1), (40, 50))
    assert [(rank.pid, rank.rank) for rank in trace.ranks] == [(10, 0), (20, 1)]


def test_workers_that_nothing_joins_to_one_of_several_cores_are_named(tmp_path: Path) -> None:
    trace = two_cores(tmp_path, (0, 1), (0, 0))
    (tmp_path / "30-1.json").write_text("no report")
    said = " ".join(trace.warnings)
    for who in (
        "process 10 on host runs cycles",
        "process 20 on host runs cycles",
        "process 30 (rank 0) on host works",
    ):
        assert who in said
    skew = rank_skew(trace, np.ones(len(trace.main.cycles), bool))
    assert skew is not None and set(trace.warnings) <= set(skew.notes), "the report says it"


@pytest.mark.parametrize(
    "said, counted",
    [((0, 0), [0, 1]), ((-1, -1), [0, 1]), ((1, 1, 0), [0, 1, 2]), ((-1, 0), [0, -1]), ((0, 1), [0, 1])],
)
def test_processes_of_one_rank_have_rows_of_their_own(
    tmp_path: Path, said: tuple[int, ...], counted: list[int]
) -> None:
    paths = [
        write_ring(tmp_path / f"{5 + i}-1.ring", repeat_cycle(one_cycle(), 5 + i, 100), pid=5 + i, rank=rank)
        for i, rank in enumerate(said)
    ]
    trace = load_rings(paths, PLAN)
    assert [rank.rank for rank in trace.ranks] == counted
    for table in (cycle_columns(trace), span_columns(trace)):
        pids = (
            {rank: {int(p) for p in table["pid"][table["rank"] == rank]} for rank in counted} if "pid" in table else {}
        )
        assert all(len(of) == 1 for of in pids.values())
        assert sorted(set(table["rank"].tolist())) == sorted(counted)
    assert shared_ranks(cycle_columns(trace)) == []
    shared = len(set(said)) < len(said)
    assert bool(trace.warnings) == shared and (not shared or "process 5 on host" in trace.warnings[0])


def test_the_place_of_what_the_draft_missed_is_a_column_where_any_cycle_has_one(tmp_path: Path) -> None:
    plan = make_plan(POINTS, [*VALUES, "cycle.missed_rank"])
    (tmp_path / "bare").mkdir()
    (tmp_path / "both").mkdir()
    missed = np.concatenate([one_cycle(), make_records([(7, 1095, 0, STEPS + 1, VALUE, 0, 0)])])
    trace = load(tmp_path, repeat_cycle(missed, 4, 100), plan=plan)
    assert cycle_columns(trace)["missed_rank"].tolist() == [7] * 4
    bare = load(tmp_path / "bare", repeat_cycle(one_cycle(), 4, 100), plan=plan)
    assert bare.main.cycles.missed_rank.tolist() == [-1] * 4 and "missed_rank" not in cycle_columns(bare)
    both = load(tmp_path / "both", repeat_cycle(missed, 4, 100), repeat_cycle(one_cycle(), 4, 100), plan=plan)
    assert sorted(cycle_columns(both)["missed_rank"].tolist()) == [-1] * 4 + [7] * 4


def test_a_cycle_with_very_many_calls_does_not_widen_the_table_of_steps_without_bound(tmp_path: Path) -> None:
    calls = [(1000 + 10 * i, 1005 + 10 * i, 0, DRAFT, SPAN, 0, 0) for i in range(3000)]
    long = make_records([*calls, (1000, 41_000, 0, CYCLE_ID, SPAN, 0, 0)])
    trace = load(tmp_path, repeat_cycle(long, 4, 50_000))
    steps = trace.main.steps_ns["draft.forward"]
    assert steps.shape == (4, 1024) and bool((steps == 5).all())
    assert trace.main.self_ns[1][trace.index.names.index("draft.forward")] == 15_000, "its time stays in the phase"
    assert len(trace.warnings) == 1 and f"{4 * (3000 - 1024)} calls" in trace.warnings[0]


def test_a_wrapper_of_the_whole_cycle_is_not_counted(tmp_path: Path) -> None:
    plan = make_plan([("cycle", "cycle", "none"), ("verify.forward", "leaf", "none"), ("other.loop", "span", "none")])
    cycle = make_records(
        [(1010, 1090, 0, 2, SPAN, 0, 0), (1000, 1095, 0, 1, SPAN, 0, 0), (998, 1097, 0, 3, SPAN, 0, 0)]
    )
    trace = load(tmp_path, repeat_cycle(cycle, 4, 100), plan=plan)
    assert trace.main.self_ns[1].tolist() == [15, 80, 0]


def test_no_cycle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match="No cycle"):
        load(tmp_path, make_records([(1, 2, 0, VERIFY, SPAN, 0, 0)]))


def test_nesting_agrees_with_a_stack() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        spans: list[tuple[int, int]] = []
        clock = 0

        def grow(depth: int) -> None:
            nonlocal clock
            start = clock
            for _ in range(int(rng.integers(0, 4))):
                if depth < 5:
                    clock += 1
                    grow(depth + 1)
            clock += 1
            spans.append((start, clock))  # noqa: B023

        for _ in range(3):
            grow(0)
            clock += 1
        t0 = np.array([s[0] for s in spans], np.int64)
        containers, parent = nest(t0)
        for i, (a, b) in enumerate(spans):
            around = [j for j, (x, y) in enumerate(spans) if x <= a and y >= b and j != i]
            expected = min(around, key=lambda j: spans[j][1] - spans[j][0]) if around else -1
            assert (containers[parent[i]] if parent[i] >= 0 else -1) == expected


def test_a_step_without_a_request_is_no_cycle_time(tmp_path: Path) -> None:
    plan = make_plan(POINTS, ["verify.forward.batch"])
    batch = DRAFTED
    cycle = make_records([(1000, 1095, 0, CYCLE_ID, SPAN, 0, 0), (1, 1010, 0, batch, VALUE, 0, 0)])
    records = repeat_cycle(cycle, 6, 100)
    values = np.flatnonzero((records["kind"] == VALUE) & (records["point"] == batch))
    records["t0"][values[3]] = 0
    table = load(tmp_path, records, plan=plan).main.cycles
    assert table.batch.tolist() == [1, 1, 1, 0, 1, 1]
    assert [c.DROPS[d] for d in table.drop[1:5]] == ["", "", c.DROPS[c.EMPTY], ""]
