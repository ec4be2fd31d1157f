"""A stamp kernel in Triton, for benchmarks/device_stamp_cost.py alone: what launching one by Triton costs the host."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def stamp(counter, rows, mask):  # type: ignore[no-untyped-def]
    """Take the next row and store the device's clock in it."""
    place = tl.atomic_add(counter, 1)
    tl.store(rows + (place & mask), globaltimer().to(tl.int64))
