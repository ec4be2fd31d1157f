"""The Triton kernels on the CPU against float64: run with TRITON_INTERPRET=1, where Triton is installed.

Its interpreter (3.6) needs a numpy below 2.4.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support import tiny_eagle
from tests.support.cuda_reference import CHECKS, SMALL, Bench, check_same_rows

# Not set here: Triton reads it when it is imported, and tests on a GPU may share the process.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is not asked for (TRITON_INTERPRET=1)", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from specmeter.eagle.cuda_ops import TorchOps
from specmeter.eagle.cuda_triton import TritonOps, Tuning

OPS = TritonOps(Tuning(columns=16, vocab_columns=32, inner=32, keys=16))


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_in_float64(name: str) -> None:
    assert CHECKS[name](OPS, Bench(SMALL, "cpu", torch.float32)) < 1e-5


def test_a_row_is_the_same_alone_and_among_others() -> None:
    assert check_same_rows(OPS, Bench(SMALL, "cpu", torch.float32)) == 0.0


def test_a_whole_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specmeter.eagle.cuda_worker import CudaWorker
    from specmeter.eagle.engine import Engine, SpecSettings
    from tests.support.device_engine import device_engine, run

    monkeypatch.setattr(tiny_eagle, "HEAD_DIM", 16)
    folders = tiny_eagle.write_target(tmp_path / "target"), tiny_eagle.write_head(tmp_path / "head")
    wanted = device_engine(*folders, context=60)
    worker = wanted.worker
    with_kernels = Engine(CudaWorker(worker.target, worker.head, 60, OPS))
    assert isinstance(worker, CudaWorker) and isinstance(worker.ops, TorchOps)
    for settings in (None, SpecSettings(2)):
        cycles = run(wanted, [3, 1, 4], settings, max_tokens=4)
        assert run(with_kernels, [3, 1, 4], settings, max_tokens=4) == cycles
