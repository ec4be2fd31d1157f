"""The device engine on the CPU: the same passes as plain functions, and a request through it."""

from __future__ import annotations

from pathlib import Path

from specmeter.eagle.config import DraftConfig
from specmeter.eagle.cuda_ops import TorchOps
from specmeter.eagle.cuda_worker import CudaWorker
from specmeter.eagle.draft import Draft
from specmeter.eagle.engine import Cycle, Engine, Sampling, SpecSettings
from specmeter.eagle.linear import PLAIN_FLOAT32
from specmeter.eagle.settings import MAX_DRAFT_TOKENS, MAX_STEPS
from specmeter.eagle.target import Target


def device_engine(target_dir: Path, head_dir: Path, context: int = 400) -> Engine:
    """An engine whose greedy chains take the device's passes, in float32."""
    config = DraftConfig.from_dir(head_dir)
    positions = context + MAX_DRAFT_TOKENS + MAX_STEPS
    target = Target.from_dir(target_dir, capture=config.capture, positions=positions, layout=PLAIN_FLOAT32)
    draft = Draft.from_dir(head_dir, config, target, positions=positions)
    return Engine(CudaWorker(target, draft, context, TorchOps()))


def run(engine: Engine, prompt: list[int], spec: SpecSettings | None, **sampling: object) -> list[Cycle]:
    """All cycles of one request of at most 40 tokens, greedy unless ``sampling`` says otherwise."""
    return list(engine.generate(prompt, Sampling(**{"max_tokens": 40, **sampling}), spec))  # type: ignore[arg-type]
