"""Which layout of the weights the engine uses: what works here is found by trial, what is fastest by a short timing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specmeter.eagle.linear import (
    HALF,
    PACKED_BFLOAT16,
    PACKED_FLOAT32,
    PLAIN_BFLOAT16,
    PLAIN_FLOAT32,
    Layout,
    Linear,
)
from specmeter.errors import SpecmeterError

# The first of a list is kept unless a later one is faster by _MARGIN, so that equal starts choose equally.
_CANDIDATES: dict[str, tuple[Layout, ...]] = {
    "float32": (PACKED_FLOAT32, PLAIN_FLOAT32),
    "bfloat16": (PACKED_BFLOAT16, PLAIN_BFLOAT16),
    "float16": (HALF,),
    "auto": (HALF, PACKED_BFLOAT16, PLAIN_BFLOAT16, PACKED_FLOAT32, PLAIN_FLOAT32),
}
DTYPES = tuple(_CANDIDATES)
_MARGIN = 0.9
_SHAPE = (1024, 512)
_ROWS = (1, 4)
_REPEATS = 4
# Decoding finds every weight in memory, not in a cache. Each layout's pass comes after those of all the others, which
# push its weights out of the caches; so a small share each does.
_PARAMETERS = 6 << 20


def choose_layout(dtype: str) -> Layout:
    """The fastest layout for ``dtype``: "auto", "float32", "bfloat16" or "float16".

    "auto" may choose any of them; float16 stands for fp16 weights under float32 activations.
    Raises SpecmeterError for an unknown name or where nothing for it works here.
    """
    if dtype not in _CANDIDATES:
        raise SpecmeterError(f"Unknown dtype {dtype!r}.", "", f"Use {', '.join(DTYPES)}.")
    working = [layout for layout in _CANDIDATES[dtype] if works(layout)]
    if not working:
        raise SpecmeterError(
            f"dtype {dtype} does not work here.", "This torch lacks its kernels on this machine.", "Use --dtype auto."
        )
    if len(working) == 1:
        return working[0]
    return fastest(working, time_layouts(working))


def fastest(layouts: Sequence[Layout], seconds: Sequence[float]) -> Layout:
    """The first of ``layouts``, or a later one that takes less than 0.9 of its ``seconds``."""
    best = 0
    for index in range(1, len(layouts)):
        if seconds[index] < _MARGIN * seconds[best]:
            best = index
    return layouts[best]


def works(layout: Layout) -> bool:
    """True if this torch, on this machine, computes with ``layout``, correctly."""
    weight = torch.linspace(-1, 1, 32 * 16, dtype=torch.float32).reshape(32, 16).to(layout.weights)
    x = torch.linspace(-1, 1, 2 * 16, dtype=torch.float32).reshape(2, 16).to(layout.activations)
    other = torch.linspace(-2, 2, 2 * 32, dtype=torch.float32).reshape(2, 32).to(layout.activations)
    try:
        with torch.inference_mode():
            got = layout.linear(weight).plus(x, other.clone())
    except (AttributeError, RuntimeError):
        return False
    want = x.float() @ weight.float().T + other.float()
    return torch.allclose(got.float(), want, rtol=0.02, atol=0.05)


def time_layouts(layouts: Sequence[Layout]) -> list[float]:
    """Seconds of a pass over 6 M weights with 1 row and with 4, for each layout: the least of four, interleaved.

    One thread's own processor time, so that a busy machine gives the same answer as a quiet one: by the clock, two
    threads that wait for each other chose another layout in every other start under load.
    """
    best = [float("inf")] * len(layouts)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            chains = [(_chain(layout), _inputs(layout)) for layout in layouts]
            for _ in range(_REPEATS):
                for index, (chain, inputs) in enumerate(chains):
                    best[index] = min(best[index], _pass(chain, inputs))
    finally:
        torch.set_num_threads(threads)
    return best


def _chain(layout: Layout) -> list[Linear]:
    weight = torch.full(_SHAPE, 1 / 32, dtype=layout.weights)
    return [layout.linear(weight.clone()) for _ in range(_PARAMETERS // weight.numel())]


def _inputs(layout: Layout) -> list[Tensor]:
    return [torch.full((rows, _SHAPE[1]), 0.5, dtype=layout.activations) for rows in _ROWS]


def _pass(chain: Sequence[Linear], inputs: Sequence[Tensor]) -> float:
    start = time.thread_time()
    for x in inputs:
        for linear in chain:
            linear(x)
    return time.thread_time() - start
