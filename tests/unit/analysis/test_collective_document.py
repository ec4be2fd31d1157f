"""The document on collectives: decode cycles alone, each setting by itself, each collective with who issued it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.collective_document import by_issuer, collective_facts
from specmeter.trace.build import Trace, load_rings
from specmeter.trace.deep import DeepWindow, kernel_columns, sync_columns
from specmeter.trace.ring import read_ring
from specmeter.trace.synthetic_ranks import PLAN, REDUCE, TRANSFER_NS, VERIFY, Ranks, write_ranks

CYCLES, CALLS = 20, 4
NAMES = ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "gemm")


def window(path: Path, setting: str = "k=3", notes: tuple[str, ...] = ()) -> DeepWindow:
    """The rank's all-reduces as kernels that its host calls launched and that lasted as long; a GEMM in each verify."""
    ring = read_ring(path)
    spans = ring.records[np.isin(ring.records["point"], (REDUCE, VERIFY)) & (ring.records["kind"] == 0)]
    verify = spans["point"] == VERIFY
    t0 = spans["t0"] + np.where(verify, 1_000, 0)
    dur = np.where(verify, 5_000, spans["t1"] - spans["t0"])
    kernels = kernel_columns(
        name=verify.astype(int), t0_ns=t0, dur_ns=dur, launch_ns=t0 + 1, cycle=spans["cycle"], point=spans["point"]
    )
    begin, end = int(spans["t0"].min()), int(spans["t1"].max()) + 10**9
    return DeepWindow(
        ring.header.pid, ring.header.host, ring.header.rank, "H200", begin - 10**6, end, (1, CYCLES), NAMES, kernels,
        sync_columns(), (), setting=setting, notes=notes,
    )  # fmt: skip


@pytest.fixture
def taken(tmp_path: Path) -> tuple[Trace, list[Path]]:
    paths = write_ranks(tmp_path, Ranks(3, 1, CYCLES, CALLS, straggler=2))
    return load_rings(paths, PLAN), paths


def test_collectives_belong_to_the_phase_that_issues_them(taken: tuple[Trace, list[Path]]) -> None:
    trace, paths = taken
    assert set(by_issuer(trace, window(paths[0])).kernels["point"].tolist()) == {VERIFY}
    found = collective_facts(trace, [window(path) for path in paths])
    assert found is not None
    (verify,) = found["phases"]
    assert (verify["phase"], verify["count"]) == ("verify", CALLS)
    assert verify["transfer_ms"] == pytest.approx(CALLS * TRANSFER_NS / 1e6)
    assert verify["straggler"]["rank"] == 2
    # The first cycle after arming and the last one, which is open, are no decode cycles that count.
    assert found["cycles"] == CYCLES - 2
    assert verify["busy_ms"] == pytest.approx(verify["ms"]["point"] + 0.005)


def test_each_setting_is_by_itself_and_a_second_window_of_a_process_replaces_the_first(
    taken: tuple[Trace, list[Path]],
) -> None:
    trace, paths = taken
    plain = [window(path, "baseline") for path in paths]
    spec = [window(path) for path in paths]
    broken = replace(spec[0], kernels={**spec[0].kernels, "name": np.ones_like(spec[0].kernels["name"])})
    found = collective_facts(trace, [*plain, broken, *spec])
    assert found is not None and (found["setting"], found["cycles"]) == ("k=3", CYCLES - 2)
    assert [other["setting"] for other in found["others"]] == ["baseline"]


def test_a_process_without_collectives_is_said_and_the_rest_counts(taken: tuple[Trace, list[Path]]) -> None:
    trace, paths = taken
    spec = [window(path, notes=("the same for all",)) for path in paths]
    core = replace(spec[0], kernels={**spec[0].kernels, "name": np.ones_like(spec[0].kernels["name"])}, pid=99, rank=-1)
    found = collective_facts(trace, [core, *spec])
    assert found is not None and len(found["ranks"]) == 3
    assert any("holds no collective" in note for note in found["notes"])
    assert found["notes"].count("the same for all") == 1


def test_cycles_are_told_by_the_first_window_that_is_left(taken: tuple[Trace, list[Path]]) -> None:
    trace, paths = taken
    spec = [window(path) for path in paths]
    # Rank 0 ran no collective and counts other cycles; the others' first and last cycles still do not count.
    kernels = {**spec[0].kernels, "name": np.ones_like(spec[0].kernels["name"]), "cycle": spec[0].kernels["cycle"] + 7}
    odd = replace(spec[0], kernels=kernels, cycles=(8, CYCLES + 7))
    found = collective_facts(trace, [odd, *spec[1:]])
    assert found is not None and [row["rank"] for row in found["ranks"]] == [1, 2]
    assert found["cycles"] == CYCLES - 2


def test_windows_without_any_collective_are_no_document(taken: tuple[Trace, list[Path]]) -> None:
    trace, paths = taken
    none = [replace(w, names=("relu", "gemm")) for w in map(window, paths)]
    assert collective_facts(trace, none) is None and collective_facts(trace, []) is None
