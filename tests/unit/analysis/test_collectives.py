"""Collectives of deep windows: matched over ranks, split into transfer and waiting, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from specmeter.analysis.collective_kernels import collective_of
from specmeter.analysis.collective_words import draft_collectives_ms, nccl_cannot_help
from specmeter.analysis.collectives import Collectives, collectives
from specmeter.analysis.kernel_classes import CLASSES, classes_of
from specmeter.reporters.collectives_view import collectives_parts
from specmeter.trace.deep import DeepWindow, kernel_columns, sync_columns
from specmeter.trace.deep_window import select
from specmeter.trace.host_clock import HostClock
from specmeter.trace.plan import index_plan
from specmeter.trace.synthetic import make_plan

INDEX = index_plan(
    make_plan([("cycle", "cycle", "none"), ("verify.forward", "leaf", "none"), ("draft.forward", "leaf", "loop")])
)
VERIFY, DRAFT = 2, 3
GEMM = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CUSTOM = "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(sglang::RankData*, sglang::RankSignals)"
NAMES = (GEMM, NCCL, GATHER, CUSTOM)
TRANSFER_NS = 20_000


@dataclass(frozen=True)
class Ring:
    """Ranks in lockstep: ``verify`` collectives of each cycle's verify, one of its draft, each after a GEMM.

    ``slow`` ns more than the others the rank ``straggler`` computes before each of them.
    """

    ranks: int = 2
    cycles: int = 30
    verify: int = 6
    straggler: int = 1
    slow_ns: int = 30_000
    kernel: int = 1
    seed: int = 0
    hosts: Sequence[str] = ("host",)
    clock_ns: Sequence[int] = (0,)
    first_cycle: Sequence[int] = field(default=(1,))

    def windows(self) -> list[DeepWindow]:
        """The window of each rank, on its host's clock, with its own cycle numbers."""
        rng = np.random.default_rng(self.seed)
        rows: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(self.ranks)]
        now = np.full(self.ranks, 10**9)
        for cycle in range(self.cycles):
            now = now + int(rng.integers(100_000, 900_000))
            for number in range(self.verify + 1):
                point, kernel = (VERIFY, self.kernel) if number < self.verify else (DRAFT, 3)
                work = 50_000 + rng.integers(0, 300, self.ranks)
                work[self.straggler] += self.slow_ns if point == VERIFY else 0
                arrived = now + work
                end = int(arrived.max()) + TRANSFER_NS
                for rank in range(self.ranks):
                    rows[rank].append((0, int(now[rank]), int(work[rank]), cycle, point))
                    rows[rank].append((kernel, int(arrived[rank]), end - int(arrived[rank]), cycle, point))
                now = np.full(self.ranks, end)
        return [self._window(rank, rows[rank]) for rank in range(self.ranks)]

    def _window(self, rank: int, rows: list[tuple[int, int, int, int, int]]) -> DeepWindow:
        def of(values: Sequence[object]) -> object:
            return values[rank * len(values) // self.ranks]

        name, t0, dur, cycle, point = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        first, shift = int(self.first_cycle[rank % len(self.first_cycle)]), int(of(self.clock_ns))  # type: ignore[call-overload]
        kernels = kernel_columns(
            name=name, t0_ns=t0 + shift, dur_ns=dur, launch_ns=t0 + shift - 5_000, cycle=cycle + first, point=point,
            bytes=np.where(name > 0, 40_960, -1),
        )  # fmt: skip
        return DeepWindow(
            100 + rank, str(of(self.hosts)), rank, "H200", int(t0[0]) + shift, int(t0[-1] + dur[-1]) + shift,
            (first, first + self.cycles - 1), NAMES, kernels, sync_columns(), (),
        )  # fmt: skip


def found_in(windows: Sequence[DeepWindow], **more: object) -> Collectives:
    found = collectives(windows, INDEX, **more)  # type: ignore[arg-type]
    assert found is not None
    return found


def without(window: DeepWindow, *rows: int) -> DeepWindow:
    keep = np.setdiff1d(np.arange(len(window.kernels["t0_ns"])), rows)
    return replace(window, kernels=select(window.kernels, keep))


def test_time_is_split_into_transfer_and_waiting_and_the_last_rank_is_named() -> None:
    found = found_in(Ring().windows())
    verify = next(row for row in found.phases if row.phase == "verify")
    assert (found.cycles, found.left_out, verify.count, verify.by_nccl) == (30, 0, 6.0, 6.0)
    assert verify.transfer_ms == pytest.approx(6 * TRANSFER_NS / 1e6)
    # Rank 0 waits 30 us a collective, rank 1 not at all: the mean of the two.
    assert verify.waiting_ms is not None and verify.waiting_ms.point == pytest.approx(6 * 0.015, rel=0.02)
    assert verify.straggler is not None and (verify.straggler.rank, verify.straggler.percent) == (1, 100.0)
    assert verify.straggler.behind_ms == pytest.approx(6 * 0.030, rel=0.02)
    assert verify.skew_us is not None and verify.skew_us["p50"] == pytest.approx(30, abs=0.5)
    assert verify.busy_ms == pytest.approx(6 * (0.050 + 0.030 + 0.020), rel=0.02)
    assert verify.percent == pytest.approx(100 * 35 / 100, rel=0.02)
    assert verify.exposed_ms == pytest.approx(verify.ms.point)
    assert found.sentences[0].startswith(
        "Communication is 35 % of verify (0.21 of 0.60 ms a cycle), 43 % of it waiting"
    )
    assert "which is rank 1 in 100 %; NCCL serves 6 of 6 collectives in verify." in found.sentences[0]
    kind = found.kinds[0]
    assert (kind.operation, kind.backend, kind.bytes) == ("all-reduce", "NCCL", 40_960)
    assert kind.gb_s == pytest.approx(40_960 / TRANSFER_NS)
    waited = [row.waiting_ms for row in found.ranks]
    assert waited[0] == pytest.approx(6 * 0.030, rel=0.05) and waited[1] == pytest.approx(0, abs=0.002)


def test_collectives_of_another_size_have_a_row_of_their_own() -> None:
    windows = Ring().windows()
    for window in windows:
        # Every second one of verify moves four times as much; the kernels of a cycle lie in the same order on all.
        of = np.flatnonzero((window.kernels["bytes"] >= 0) & (window.kernels["point"] == VERIFY))
        window.kernels["bytes"][of[::2]] = 163_840
    rows = [row for row in found_in(windows).kinds if row.phase == "verify"]
    assert {(row.bytes, row.count) for row in rows} == {(40_960.0, 3.0), (163_840.0, 3.0)}
    speeds = {row.bytes: row.gb_s for row in rows}
    assert speeds[163_840.0] == pytest.approx(163_840 / TRANSFER_NS)


def test_work_on_another_stream_hides_communication_which_then_is_not_alone() -> None:
    windows = []
    for window in Ring().windows():
        k = window.kernels
        mine = np.flatnonzero((k["name"] == 1) & (k["point"] == VERIFY))
        more = {name: np.concatenate([k[name], k[name][mine]]) for name in k}
        more["name"][len(k["t0_ns"]) :] = 0
        order = np.argsort(more["t0_ns"], kind="stable")
        windows.append(replace(window, kernels=select(more, order)))
    verify = next(row for row in found_in(windows).phases if row.phase == "verify")
    assert verify.ms.point > 0.2 and verify.exposed_ms == pytest.approx(0, abs=1e-9)


def test_nccl_serves_none_and_tune_is_told_so() -> None:
    document = {"collectives": found_in(Ring(verify=61, kernel=3).windows()).as_json()}
    told = nccl_cannot_help(document)
    assert told == "NCCL serves 0 of 61 collectives in verify: no variable can help while custom all-reduce does"
    assert nccl_cannot_help({"collectives": found_in(Ring().windows()).as_json()}) is None
    assert nccl_cannot_help({}) is None
    assert draft_collectives_ms(document) == {"draft": pytest.approx(TRANSFER_NS / 1e6, rel=0.02)}


def test_a_rank_without_a_window_is_named_and_a_single_one_splits_nothing() -> None:
    windows = Ring(ranks=4).windows()
    found = found_in([windows[0], windows[1], windows[3]], ranks=range(4))
    assert "rank 2 has no window: waiting for it is counted as transfer" in found.notes
    alone = found_in(windows[:1], ranks=range(4))
    verify = next(row for row in alone.phases if row.phase == "verify")
    assert (verify.transfer_ms, verify.waiting_ms, verify.skew_us, verify.straggler) == (None, None, None, None)
    assert "takes windows of all ranks" in alone.sentences[0]
    assert len(alone.notes) == 3


def test_cycles_with_other_collectives_on_a_rank_are_left_out_and_said() -> None:
    windows = Ring(ranks=3).windows()
    gone = np.flatnonzero((windows[2].kernels["name"] == 1) & (windows[2].kernels["cycle"] == 7))[2]
    found = found_in([windows[0], windows[1], without(windows[2], int(gone))])
    assert (found.cycles, found.left_out) == (29, 1)
    assert "1 of 30 cycles were left out: the ranks ran different collectives in them" in found.notes
    whole = found_in(windows)
    assert found.phases[1].transfer_ms == pytest.approx(whole.phases[1].transfer_ms)


def test_a_window_without_whole_cycles_is_left_out_and_said() -> None:
    windows = Ring(ranks=3).windows()
    empty = replace(windows[0], cycles=(0, -1))
    found = found_in([empty, *windows[1:]])
    assert found.cycles == 30 and [row.rank for row in found.ranks] == [1, 2]
    assert any("rank 0" in note and "left out" in note for note in found.notes)


def test_where_no_window_that_holds_collectives_has_a_whole_cycle_there_is_nothing_to_say() -> None:
    first, second = Ring(ranks=2).windows()
    quiet = replace(second, kernels=select(second.kernels, second.kernels["name"] == 0))
    for windows in ([replace(first, cycles=(0, -1)), quiet], [replace(first, cycles=(0, -1))]):
        assert collectives(windows, INDEX, only=lambda window: np.arange(3, 8)) is None


HOUR_NS = 3_600_000_000_000


@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 5), st.integers(12, 40), st.integers(0, 10**6), st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**6)), max_size=4), st.booleans(),
)  # fmt: skip
def test_matching_survives_drops_skews_lags_and_far_clocks(
    ranks: int, cycles: int, seed: int, straggler: int, drops: list[tuple[int, int]], far: bool
) -> None:
    """Whatever is dropped, the collectives that count are each one and the same: their ends agree on the true clock."""
    clock = (0, HOUR_NS + seed) if far else (0,)
    ring = Ring(
        ranks, cycles, 3, straggler % ranks, 25_000, seed=seed, hosts=("a", "b") if far else ("a",), clock_ns=clock,
        first_cycle=(5, 9, 2),
    )  # fmt: skip
    windows = ring.windows()
    lost: dict[int, set[int]] = {}
    for rank, pick in drops:
        lost.setdefault(rank % ranks, set()).add(pick % len(windows[0].kernels["t0_ns"]))
    windows = [without(w, *lost.get(i, set())) for i, w in enumerate(windows)]
    clocks = {"a": HostClock("boot-a", 10**18), "b": HostClock("boot-b", 10**18)}
    found = found_in(windows, clocks=clocks)
    assert found.cycles + found.left_out <= cycles and found.left_out <= len(drops)
    assert found.cycles >= cycles - len(drops) - (cycles // 4 if far else 0)
    verify = next(row for row in found.phases if row.phase == "verify")
    assert (len(found.ranks), verify.count) == (ranks, 3.0)
    assert verify.transfer_ms == pytest.approx(3 * TRANSFER_NS / 1e6)
    assert verify.straggler is not None and verify.straggler.rank == straggler % ranks
    if far:
        bound = found.ranks[-1].clock.error_ns
        assert bound is not None and bound < 60_000
        assert abs(found.ranks[-1].clock.offset_ns + HOUR_NS + seed) <= bound


def test_only_the_cycles_asked_for_count() -> None:
    found = collectives(Ring().windows(), INDEX, only=lambda window: np.arange(3, 8))
    assert found is not None and found.cycles == 5 and found.phases[0].count == 1.0


@pytest.mark.parametrize("width", [40, 64, 100])
def test_nothing_of_the_report_is_cut(width: int) -> None:
    document = {"collectives": found_in(Ring(ranks=20).windows(), ranks=range(21)).as_json()}
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for part in collectives_parts(document, width):
            console.print(part)
    text = capture.get()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert "and 4 more" in text and "rank 20 has no window" in text.replace("\n", " ")
    assert list(collectives_parts({"collectives": None}, width)) == []


def test_every_collective_by_name_is_one_for_the_kernel_classes_too() -> None:
    names = (
        NCCL, GATHER, CUSTOM, "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16", "ncclKernel_AllReduce_RING_LL_Sum_half",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1, __nv_bfloat16, 8, true>",
        "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16, 8u, true>",
        "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8, __nv_bfloat16>",
        "multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>", "two_shot_all_reduce_kernel_inplace<float, 16>",
        "void deep_ep::internode_ll::dispatch<true, 7168>", "gloo:all_reduce",
    )  # fmt: skip
    kinds = classes_of(names, None)
    for name, kind in zip(names, kinds.tolist(), strict=True):
        assert collective_of(name) is not None, name
        assert CLASSES[kind] == "collectives", name
    for name in (GEMM, "void at::native::vectorized_gather_kernel<16>", "reduce_kernel<512, 1>", "rms_norm_kernel"):
        assert collective_of(name) is None, name
