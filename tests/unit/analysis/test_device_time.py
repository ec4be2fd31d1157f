"""Device time of windows whose every number is known: launches, graphs, streams, run-ahead, waits, collectives."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.analysis.device_document import cycle_groups, window_facts
from specmeter.analysis.device_idle import attribute
from specmeter.analysis.device_join import Joined, chosen_cycles, counted_gaps, join
from specmeter.analysis.device_time import DeviceTime, PhaseTime, device_time
from specmeter.trace import Trace
from specmeter.trace.deep_synthetic import Call, Kernel, copy_kernel
from specmeter.trace.deep_window import DeepWindow
from tests.support.deep_runs import BETWEEN, on, recorded

GEMM, NCCL = "nvjet_tst_64x8", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
EAGER = [Call(on("verify.forward"), (Kernel(GEMM, 1000),) * 3, host_ns=10_000)]


def analysed(folder: Path, cycles: Sequence[Sequence[Call]], **how: Any) -> tuple[DeviceTime, Joined]:
    joined = join(*recorded(folder, cycles, **how))
    assert joined is not None
    return device_time(joined, chosen_cycles(joined))[0], joined


def phase(found: DeviceTime, name: str) -> PhaseTime:
    return next(row for row in found.phases if row.name == name)


def shifted(window: DeepWindow, by: np.ndarray) -> DeepWindow:
    return replace(window, kernels={**window.kernels, "t0_ns": window.kernels["t0_ns"] + by})


def facts(trace: Trace, window: DeepWindow) -> dict[str, Any]:
    return window_facts(trace, window)


def test_eager_launches_leave_the_device_idle_between_them(tmp_path: Path) -> None:
    # Launches take 4 us each, a kernel begins 2 us after its launch began and takes 1: 22 us a cycle, 3 of them busy.
    found, _ = analysed(tmp_path, [EAGER] * 6)
    assert found.cycles == 6
    assert (found.busy_ms.point, found.idle_ms.point) == pytest.approx((0.003, 0.019))
    assert found.period_ms.point == pytest.approx(0.022) and found.cycle_ms.point == pytest.approx(0.022)
    row = phase(found, "verify.forward")
    assert (row.span_ms, row.idle_inside_ms, row.idle_before_ms) == pytest.approx((0.009, 0.006, 0.013))
    assert (row.host_work_ms, row.host_wait_ms) == pytest.approx((0.022, 0.0))
    assert (row.kernels, row.launches, row.graph_launches, row.graph) == (3, 3, 0, "eager")
    # The kernel begins before the call has returned.
    assert row.delay.median_us == pytest.approx(-2.0) and row.delay.n == 18
    assert row.bound.word == "host-bound" and row.bound.host == pytest.approx(19 / 22)
    assert found.bound.word == "host-bound" and found.leaf_percent == pytest.approx(100)


def test_a_replay_is_one_launch_of_many_kernels(tmp_path: Path) -> None:
    call = Call(on("verify.forward"), tuple(Kernel(GEMM, 2000) for _ in range(10)), host_ns=50_000, graph=True)
    found, _ = analysed(tmp_path, [[call]] * 5)
    row = phase(found, "verify.forward")
    assert (row.kernels, row.launches, row.graph_launches, row.graph) == (10, 0, 1, "graph")
    assert (row.busy_ms, row.span_ms, row.idle_inside_ms) == pytest.approx((0.020, 0.020, 0.0))
    assert row.delay.n == 5 and row.idle_before_ms == pytest.approx(0.034)


def test_a_host_that_runs_ahead_leaves_no_idle_time_and_its_cycles_are_not_mixed(tmp_path: Path) -> None:
    cycle = [
        Call(on("draft.graph"), (Kernel("draft_gemm", 20_000),) * 2, host_ns=2000, graph=True),
        Call(on("verify.forward"), (Kernel(GEMM, 10_000),) * 6, host_ns=3000, graph=True),
    ]
    found, joined = analysed(tmp_path, [cycle] * 8)
    assert found.idle_ms.point == pytest.approx(0) and found.busy_ms.point == pytest.approx(0.100)
    assert found.bound.word == "device-bound" and found.bound.device == pytest.approx(1)
    # The host is done with a cycle in 13 us: when cycle 8 is launched, cycle 1 still runs.
    assert found.cycle_ms.point == pytest.approx(0.013)
    draft, verify = phase(found, "draft.graph"), phase(found, "verify.forward")
    assert (draft.busy_ms, verify.busy_ms) == pytest.approx((0.040, 0.060))
    assert verify.ahead_us is not None and verify.ahead_us > 200
    counts = np.bincount(joined.cycle * 2 + (joined.window.kernels["dur_ns"] == 20_000))
    assert set(counts[0::2].tolist()) == {6} and set(counts[1::2].tolist()) == {2}


def test_two_streams_count_once(tmp_path: Path) -> None:
    call = Call(on("verify.forward"), (Kernel(GEMM, 10_000), copy_kernel(64, 10_000, stream=9)), host_ns=20_000)
    trace, window = recorded(tmp_path, [[call]] * 4)
    document = facts(trace, window)
    assert document["busy_ms"]["point"] == pytest.approx(0.014)
    parts = {row["class"]: row["ms"] for row in document["classes"]}
    assert parts == pytest.approx({"dense_gemm": 0.010, "copy": 0.004})
    assert document["phases"][0]["busy_ms"] == pytest.approx(0.014)


def test_work_of_another_stream_inside_a_span_is_not_idle(tmp_path: Path) -> None:
    # Of the copy's 12 us the verify span's gap (its second launch comes late) is covered by kv.meta on another stream.
    cycle = [
        Call(on("verify.forward"), (Kernel(GEMM, 1000),), host_ns=5000),
        Call(on("kv.meta"), (Kernel("store_kv", 30_000, stream=9),)),
        Call(on("verify.forward"), (Kernel(GEMM, 1000),), host_ns=9000),
    ]
    found, _ = analysed(tmp_path, [cycle] * 4)
    row = phase(found, "verify.forward")
    # Two calls, each a span of its own: nothing between them is taken for idle time inside.
    assert (row.span_ms, row.idle_inside_ms) == pytest.approx((0.002, 0.0))
    assert phase(found, "kv.meta").busy_ms == pytest.approx(0.030)


def test_collectives_bind_what_they_fill(tmp_path: Path) -> None:
    call = Call(on("verify.forward"), (Kernel(GEMM, 9000), Kernel(NCCL, 40_000)), host_ns=1000)
    found, _ = analysed(tmp_path, [[call, Call(on("wait.copy"), sync="cudaStreamSynchronize")]] * 4)
    row = phase(found, "verify.forward")
    assert row.bound.word == "communication-bound" and row.bound.communication > 0.75


def test_a_host_that_waits_for_input_is_not_host_bound(tmp_path: Path) -> None:
    cycle = [
        Call(on("verify.forward"), (Kernel(GEMM, 5000),), host_ns=1000),
        Call(on("wait.copy"), host_ns=90_000),
    ]
    found, joined = analysed(tmp_path, [cycle] * 5)
    assert found.bound.word == "waiting" and found.bound.waiting > 0.8
    wait = phase(found, "wait.copy")
    assert wait.host_wait_ms == pytest.approx(0.090) and wait.host_work_ms == 0
    rows = window_facts(recorded(tmp_path / "again", [cycle] * 5)[0], joined.window)["idle"]["rows"]
    assert (
        rows[0]["cause"] == "host waiting" and rows[0]["point"] == "wait.copy" and rows[0]["next"] == "verify.forward"
    )


def test_time_in_a_synchronizing_call_is_waiting_wherever_it_is(tmp_path: Path) -> None:
    call = Call(on("verify.forward"), (Kernel(GEMM, 50_000),), host_ns=6000, sync="cudaStreamSynchronize")
    found, _ = analysed(tmp_path, [[call]] * 5)
    row = phase(found, "verify.forward")
    # Launched at 6 us, begun at 8, done at 58: the call waits from 10 us on.
    assert (row.host_work_ms, row.host_wait_ms) == pytest.approx((0.010, 0.048))
    assert found.bound.word == "device-bound" and found.idle_ms.point == pytest.approx(0.008)


def test_what_follows_a_launch_is_its_latency_and_not_the_hosts_work(tmp_path: Path) -> None:
    trace, window = recorded(tmp_path, [EAGER] * 6)
    late = shifted(window, np.full(len(window.kernels["t0_ns"]), 4500))
    causes = facts(trace, late)["idle"]["causes_ms"]
    # Each kernel now begins 2.5 us after its call has returned; of the 19 us idle the host caused the rest.
    assert causes["launched, not begun"] == pytest.approx(0.0075)
    assert causes["host at work"] == pytest.approx(0.0115)


def test_a_gap_inside_a_replay_is_the_devices_own(tmp_path: Path) -> None:
    call = Call(on("verify.forward"), (Kernel(GEMM, 1000), Kernel(GEMM, 1000)), host_ns=50_000, graph=True)
    trace, window = recorded(tmp_path, [[call]] * 5)
    late = shifted(window, np.arange(len(window.kernels["t0_ns"])) % 2 * 400)
    document = facts(trace, late)
    assert document["idle"]["causes_ms"]["queued on the device"] == pytest.approx(0.0004)
    assert document["phases"][0]["idle_inside_ms"] == pytest.approx(0.0004)


def test_idle_time_goes_to_the_points_by_time_and_to_what_comes_next(tmp_path: Path) -> None:
    cycle = [
        Call(on("kv.meta"), host_ns=30_000),
        Call(on("verify.forward"), (Kernel(GEMM, 1000),), host_ns=6000),
        Call(BETWEEN, host_ns=12_000),
    ]
    trace, window = recorded(tmp_path, [cycle] * 6)
    idle = facts(trace, window)["idle"]
    # A period of 52 us less 1: 30 in kv.meta, 12 outside, 9 in verify (6 before its launch, 2 in it, 1 after).
    assert idle["total_ms"] == pytest.approx(0.051)
    assert idle["points_ms"] == pytest.approx(
        {"kv.meta": 0.030, "outside of all points": 0.012, "verify.forward": 0.009}
    )
    assert {row["next"] for row in idle["rows"]} == {"verify.forward"}


def test_kernels_outside_of_leaves_lower_the_coverage(tmp_path: Path) -> None:
    cycle = [
        Call(on("verify.forward"), (Kernel(GEMM, 5000),)),
        Call(on("kv.schedule"), (Kernel("alloc_decode_kernel", 2000),)),
        Call(on("target"), (Kernel("act_and_mul", 2000),)),
        Call(-1, (Kernel("nobody", 1000),)),
    ]
    found, _ = analysed(tmp_path, [cycle] * 4)
    assert (found.leaf_percent, found.glue_percent, found.outside_percent) == pytest.approx((70, 20, 10))


def test_a_kernel_whose_launch_was_not_seen_counts_against_the_coverage(tmp_path: Path) -> None:
    trace, window = recorded(tmp_path, [[Call(on("verify.forward"), (Kernel(GEMM, 1000),) * 4)]] * 5)
    kernels = {name: column.copy() for name, column in window.kernels.items()}
    lost = np.arange(len(kernels["t0_ns"])) % 4 == 2
    kernels["launch_ns"][lost] = kernels["cycle"][lost] = kernels["point"][lost] = -1
    document = facts(trace, replace(window, kernels=kernels))
    assert 70 < document["coverage"]["leaf_percent"] < 80
    assert document["coverage"]["outside_percent"] == pytest.approx(100 - document["coverage"]["leaf_percent"])


def test_a_point_that_only_another_thread_passes_has_kernels_but_no_calls(tmp_path: Path) -> None:
    trace, window = recorded(tmp_path, [EAGER] * 5)
    kernels = {name: column.copy() for name, column in window.kernels.items()}
    kernels["point"][1::3] = on("extend.forward")
    document = facts(trace, replace(window, kernels=kernels))
    rows = {row["name"]: row for row in document["phases"]}
    assert rows["extend.forward"]["kernels"] == 1 and rows["extend.forward"]["span_ms"] == 0
    assert rows["extend.forward"]["busy_ms"] == pytest.approx(0.001) and rows["verify.forward"]["kernels"] == 2


def test_cycles_of_other_batches_and_plain_steps_have_tables_of_their_own(tmp_path: Path) -> None:
    numbers = [(1, 3, 3, 1)] * 5 + [(8, 3, 24, 9)] * 3 + [(1, 3, 0, 0)] * 7
    trace, window = recorded(tmp_path, [EAGER] * 15, numbers=numbers)
    joined = join(trace, window)
    assert joined is not None
    groups = cycle_groups(joined, chosen_cycles(joined))
    assert [(g.plain, g.batch, g.count) for g in groups] == [(False, 1, 5), (False, 8, 3), (True, 1, 7)]
    document = facts(trace, window)
    assert document["cycles"]["cycles"] == 5 and document["cycles"]["batch"] == 1
    assert [row["kind"] for row in document["cycles"]["others"]] == ["decode", "plain"]
    hits = {(row["batch"], row["phase"]): (row["cycles"], row["graph_cycles"]) for row in document["graphs"]}
    assert hits == {(1, "verify"): (12, 0), (8, "verify"): (3, 0)}


def test_a_stall_of_the_machine_is_no_part_of_the_tables(tmp_path: Path) -> None:
    late = [Call(on("verify.forward"), (Kernel(GEMM, 1000),) * 3, host_ns=400_000)]
    trace, window = recorded(tmp_path, [*[EAGER] * 6, late, *[EAGER] * 6])
    document = facts(trace, window)
    assert document["cycles"]["cycles"] == 12 and document["cycles"]["stalled"] == 1
    assert document["cycle_ms"]["point"] == pytest.approx(0.022)


def test_unknown_kernels_are_listed_by_time(tmp_path: Path) -> None:
    call = Call(on("verify.forward"), (Kernel("strange_a", 3000), Kernel("strange_b", 9000), Kernel(GEMM, 1000)))
    found = facts(*recorded(tmp_path, [[call]] * 4))["unknown"]
    assert [row["name"] for row in found] == ["strange_b", "strange_a"]
    assert found[0]["ms"] == pytest.approx(0.009) and found[0]["kernels"] == 1


def test_steps_inside_a_fused_graph_are_told_by_what_repeats(tmp_path: Path) -> None:
    def step(us: int) -> list[Kernel]:
        names = ("embed_gather", "nvjet_qkv", "_fwd_kernel_stage1", "nvjet_o", "nvjet_mlp", "nvjet_head", "gatherTopK")
        return [Kernel(name, 1000 * us) for name in names]

    kernels = (Kernel("Memset", 500), Kernel("first_select", 1500), *step(1), *step(2), *step(3), Kernel("cat", 700))
    call = Call(on("draft.graph"), kernels, host_ns=1000, graph=True)
    found = facts(*recorded(tmp_path, [[call]] * 4))["draft_steps"]
    assert [(row["step"], row["kernels"]) for row in found] == [(0, 2), (1, 7), (2, 7), (3, 7), (None, 1)]
    assert [row["ms"] for row in found] == pytest.approx([0.002, 0.007, 0.014, 0.021, 0.0007])


def test_a_window_of_a_cpu_names_no_bound(tmp_path: Path) -> None:
    trace, window = recorded(tmp_path, [[Call(on("verify.forward"), (Kernel("aten::mm", 1000),) * 3)]] * 4)
    document = facts(trace, replace(window, on_cpu=True, device=""))
    assert document["verdict"] is None and "recorded on a CPU" in document["reason"]
    assert "phases" not in document and "idle" not in document
    assert {row["class"] for row in document["classes"]} == {"dense_gemm"}
    assert document["operators"][0]["name"] == "aten::mm"


def test_a_window_without_kernels_or_of_another_process_says_why(tmp_path: Path) -> None:
    trace, window = recorded(tmp_path, [EAGER] * 4)
    nothing = replace(window, kernels={name: column[:0] for name, column in window.kernels.items()})
    assert facts(trace, nothing)["reason"] == "the profiler saw no kernel"
    assert "no spans of this process" in facts(trace, replace(window, pid=99))["reason"]
    early = replace(window, begin_ns=0, end_ns=10)
    assert "no decode cycle" in facts(trace, early)["reason"]


CALLS = st.builds(
    Call,
    st.sampled_from([on("verify.forward"), on("draft.graph"), on("accept.sample"), on("target")]),
    st.lists(
        st.builds(
            Kernel, st.sampled_from([GEMM, NCCL, "rms_norm", "x"]), st.integers(1, 9000), st.sampled_from([7, 9])
        ),
        max_size=5,
    ).map(tuple),
    st.integers(0, 9000),
    st.booleans(),
    st.sampled_from(["", "", "cudaStreamSynchronize"]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(CALLS, min_size=1, max_size=5), min_size=2, max_size=6))
def test_parts_always_sum_to_the_whole(cycles: list[list[Call]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace, window = recorded(Path(folder), cycles)
    joined = join(trace, window)
    assert joined is not None
    if len(joined.t0):
        gaps = joined.gaps
        total = int(joined.end.max() - joined.t0.min())
        assert int(joined.added.sum() + (gaps.end - gaps.begin).sum()) == total
    chosen = chosen_cycles(joined)
    if not chosen.any():
        return
    at = counted_gaps(joined, chosen)
    blame = attribute(joined, at)
    assert int(blame.ns.sum()) == int((joined.gaps.end - joined.gaps.begin)[at].sum()) and (blame.ns > 0).all()
    document = facts(trace, window)
    first = cycle_groups(joined, chosen)[0]
    busy, idle = document["busy_ms"]["point"], document["idle_ms"]["point"]
    assert document["period_ms"]["point"] == pytest.approx(busy + idle)
    assert sum(row["ms"] for row in document["classes"]) == pytest.approx(busy)
    assert sum(row["ms"] for row in document["idle"]["rows"]) + document["idle"]["rest_ms"] == pytest.approx(idle)
    assert sum(document["idle"]["causes_ms"].values()) == pytest.approx(idle)
    wanted = sum(
        len(call.kernels) for number in np.flatnonzero(first.cycles) for call in [*cycles[0:1], *cycles][number]
    )
    assert sum(row["kernels"] for row in document["phases"]) * first.count == pytest.approx(wanted)
    assert sum(document["coverage"].values()) == pytest.approx(100) or busy == 0
