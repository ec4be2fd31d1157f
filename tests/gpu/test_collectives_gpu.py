"""Real collectives of two ranks: NCCL's kernels are recognized, matched, and split into transfer and waiting."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.collectives import collectives
from specmeter.trace.deep import KERNEL, DeepWindow, kernel_columns, sync_columns
from specmeter.trace.deep_profile import read_profile
from specmeter.trace.plan import index_plan
from specmeter.trace.synthetic import make_plan

ROOT = Path(__file__).parents[2]
CYCLES, CALLS, ELEMENTS = 30, 4, 20_480
# Two ranks; rank 1 keeps its device busy for about 100 us longer before each all-reduce.
RANK = """
import sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
rank, port, out, cycles, calls, elements = int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = torch.ones(elements, device="cuda", dtype=torch.bfloat16)
def cycle():
    for _ in range(calls):
        torch.cuda._sleep(100_000 + 180_000 * rank)
        dist.all_reduce(x)
for _ in range(10):
    cycle()
torch.cuda.synchronize()
dist.barrier()
torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
    for _ in range(cycles):
        cycle()
    torch.cuda.synchronize()
prof.export_chrome_trace(f"{out}/rank{rank}.json")
dist.destroy_process_group()
"""


def two_devices() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.device_count() >= 2 else "needs two CUDA devices"


def free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass(frozen=True)
class Taken:
    windows: list[DeepWindow]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Taken:
    if two_devices():
        pytest.skip(two_devices())
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "rank.py"
    script.write_text(RANK)
    port = str(free_port())
    numbers = [str(n) for n in (CYCLES, CALLS, ELEMENTS)]
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), port, str(folder), *numbers], cwd=ROOT)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return Taken([window(folder / f"rank{rank}.json", rank) for rank in range(2)])


def window(path: Path, rank: int) -> DeepWindow:
    """The exported kernels; every ``CALLS``-th all-reduce begins a cycle, all of them in the point verify.forward."""
    profile = read_profile(path)
    device = profile.device
    kernel = device["kind"] == KERNEL
    reduce = profile.holding(device, "AllReduce") & kernel
    cycle = np.maximum(np.cumsum(reduce) - 1, 0) // CALLS + 1
    columns = {name: device[name][kernel] for name in ("name", "kind", "stream", "t0_ns", "dur_ns", "bytes")}
    kernels = kernel_columns(**columns, cycle=cycle[kernel], point=2)
    begin, end = int(kernels["t0_ns"][0]), int((kernels["t0_ns"] + kernels["dur_ns"]).max())
    return DeepWindow(
        1 + rank, "here", rank, "GPU", begin, end, (1, CYCLES), profile.names, kernels, sync_columns(), (),
        clock_error_ns=20_000,
    )  # fmt: skip


def test_nccl_is_seen_and_the_last_rank_is_waited_for(taken: Taken) -> None:
    index = index_plan(make_plan([("cycle", "cycle", "none"), ("verify.forward", "leaf", "none")]))
    found = collectives(taken.windows, index)
    assert found is not None
    print(*found.sentences, *found.notes, *found.kinds, *found.ranks, sep="\n")
    verify = found.phases[0]
    assert (verify.phase, verify.count, verify.by_nccl) == ("verify", CALLS, CALLS)
    assert found.cycles == CYCLES and found.kinds[0].operation == "all-reduce"
    assert verify.waiting_ms is not None and verify.transfer_ms is not None
    # Rank 0 waits for about 180,000 clocks of the device a call (about 0.1 ms), rank 1 hardly.
    assert found.ranks[0].waiting_ms is not None and found.ranks[1].waiting_ms is not None
    assert found.ranks[0].waiting_ms > 0.2 > 2 * found.ranks[1].waiting_ms
    assert verify.straggler is not None and verify.straggler.rank == 1 and verify.straggler.percent > 90
    assert verify.skew_us is not None and 50 < verify.skew_us["p50"] < 300


def test_bytes_are_told_by_nccls_record(taken: Taken) -> None:
    told = [w.kernels["bytes"][w.kernels["bytes"] > 0] for w in taken.windows]
    if not all(map(len, told)):
        pytest.skip("this torch's profiler tells no sizes of collectives")
    assert {int(n) for n in np.concatenate(told)} == {2 * ELEMENTS}
