"""What ``Engine.load`` needs for a device other than the CPU: the device, the layout of the weights, the worker."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specmeter.eagle.draft import Draft
from specmeter.eagle.linear import PLAIN_BFLOAT16, PLAIN_FLOAT32, Layout
from specmeter.eagle.target import Target
from specmeter.eagle.worker import Worker
from specmeter.errors import Exit, SpecmeterError

if TYPE_CHECKING:
    from specmeter.eagle.cuda_ops import Ops

log = logging.getLogger(__name__)

DEVICES = ("cpu", "cuda", "auto")
_LAYOUTS = {"auto": PLAIN_BFLOAT16, "bfloat16": PLAIN_BFLOAT16, "float32": PLAIN_FLOAT32}


def choose_device(name: str) -> torch.device:
    """The device for "cpu", "cuda" or "auto"; SpecmeterError for CUDA where torch sees none."""
    if name not in DEVICES:
        raise SpecmeterError(f"Unknown device {name!r}.", "", f"Use {', '.join(DEVICES)}.")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        raise SpecmeterError(
            "There is no CUDA device.",
            "This torch sees no GPU." if built else f"This torch ({torch.__version__}) is built without CUDA.",
            "Start with --device cpu, or install a torch built for your GPU.",
            exit=Exit.ENVIRONMENT,
        )
    return torch.device("cuda", torch.cuda.current_device())


def device_layout(dtype: str, device: torch.device, draft_int8: bool) -> Layout:
    """Plain weights in ``dtype`` ("auto" is bfloat16) on ``device``."""
    if draft_int8:
        raise SpecmeterError("A draft in 8 bits runs on the CPU only.", "", "Leave --draft-dtype or --device out.")
    layout = _LAYOUTS.get(dtype)
    if layout is None:
        raise SpecmeterError(
            f"dtype {dtype} does not work on {device.type}.", "", "Use --dtype bfloat16, float32 or auto."
        )
    return replace(layout, name=f"{layout.name}, {torch.cuda.get_device_name(device)}", device=device)


def device_worker(target: Target, draft: Draft | None, max_context: int) -> Worker:
    """A worker whose greedy chains run in CUDA graphs."""
    from specmeter.eagle.cuda_worker import CudaWorker

    worker = CudaWorker(target, draft, max_context, _ops(target, draft))
    log.info("decode operations: %s", worker.ops.name)
    return worker


def _ops(target: Target, draft: Draft | None) -> Ops:
    from specmeter.eagle.cuda_ops import TorchOps

    if importlib.util.find_spec("triton") is None:
        log.warning("Triton is not installed: CUDA graphs of torch's own operators, several times slower")
        return TorchOps()
    from specmeter.eagle.cuda_triton import TritonOps, why_not

    reason = why_not(target, draft)
    if reason is not None:
        log.warning("torch's own operators in CUDA graphs, several times slower: %s", reason)
        return TorchOps()
    return TritonOps()
