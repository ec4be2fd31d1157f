"""Triton kernels between the products: embedding rows, the chosen token, and the book of one sequence."""
# mypy: ignore-errors
# Triton's decorator and its compiled language carry no types.

from __future__ import annotations

import triton
import triton.language as tl

from specmeter.eagle.cuda_kernels import follow

_LAST = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["rows"])
def embed_kernel(table, tokens, out, out_stride, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(table + token * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(out + row * out_stride + at, x, mask=at < SIZE)


@triton.jit
def take_kernel(
    best_value, best_index, ids, out, x, x_stride, row, keep, blocks, last,
    BLOCKS: tl.constexpr, MAP: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    lane = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    value = tl.load(best_value + lane * blocks + at, mask=at < blocks, other=float("-inf"))
    index = tl.load(best_index + lane * blocks + at, mask=at < blocks, other=_LAST)
    token = tl.min(tl.where(value == tl.max(value, 0), index, _LAST), 0)
    # Of NaN alone there is no largest: any token, but none outside the vocabulary.
    token = tl.minimum(token, last).to(tl.int64)
    if MAP:
        token = tl.load(ids + token)
    tl.store(out + lane, token)
    if KEEP:
        k = tl.arange(0, BLOCK)
        kept = tl.load(x + tl.load(row) * x_stride + k, mask=k < SIZE, other=0.0)
        tl.store(keep + k, kept, mask=k < SIZE)


@triton.jit(do_not_specialize=["steps"])
def accept_kernel(tokens, chosen, base, past, kept, result, steps, LANES: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    lane = tl.arange(0, LANES)
    own = tl.load(chosen + lane)
    drafted = tl.load(tokens + 1 + lane)
    # The first row whose draft differs, or the last row, which has none.
    agreed = tl.min(tl.where((lane < steps) & (own == drafted), LANES, lane), 0)
    last = tl.sum(tl.where(lane == agreed, own, 0), 0)
    length = tl.load(base)
    tl.store(result, agreed.to(tl.int64))
    tl.store(result + 1 + lane, own)
    tl.store(tokens, last)
    tl.store(kept, agreed.to(tl.int64))
    tl.store(past, length)
    tl.store(base, length + agreed + 1)
