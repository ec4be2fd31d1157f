"""Triton kernels of one decode pass for at most 16 rows: five a layer.

    qkv        norm, q/k/v product, bias, rotation, write to the cache
    attend     attention over the cache up to each row's own slot (and `combine` where the context is split)
    product    x W^T + residual: attention's output, down, fc
    gate_up    norm, gate and up products, silu(gate) * up
    vocab      norm, output layer, most probable token of a block of the vocabulary (`take` joins the blocks)

At these sizes a pass reads its weights once and computes next to nothing, so a product is one pass over K with the norm
folded in: sum(x^2) and (x * w) W^T are added up together, and the row's 1/rms is applied to the sum at the end. All
widths from 1 to 16 run the same code (16 rows are the least a tensor core takes), and no row's arithmetic depends on
another row or on their number. A token's logits are therefore the same bit for bit whether it was decoded alone or
verified among drafts, and greedy speculation changes no token in bfloat16 either.

PDL is Hopper's programmatic dependent launch: a kernel starts while the one before it still runs, prefetches its
weights to L2, and waits for its inputs. Only weights may be touched before ``gdc_wait``.
"""
# mypy: ignore-errors
# Triton's decorator and its compiled language carry no types.

from __future__ import annotations

import triton
import triton.language as tl

_LAST = tl.constexpr(2147483647)


@triton.jit
def follow(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _start_with_weights(rows_at, SIZE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr):
    # rows_at: pointers to the first element of each row of weights that this program will read.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        at = tl.minimum(tl.arange(0, LINES) * LINE, SIZE - 1)
        pointers = (rows_at[:, None] + at[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()


@triton.jit
def _normed_product(
    rows_at, live, norm, weight_at, weight_live, eps,
    SIZE: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((LANES, BLOCK_N), tl.float32)
    square = tl.zeros((LANES,), tl.float32)
    span = tl.arange(0, BLOCK_K)
    for start in range(0, SIZE, BLOCK_K):
        at = start + span
        inside = at < SIZE
        x = tl.load(rows_at[:, None] + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_at[None, :] + at[:, None], mask=weight_live[None, :] & inside[:, None], other=0.0)
        scale = tl.load(norm + at, mask=inside, other=0.0)
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        acc = tl.dot((wide * scale[None, :]).to(w.dtype), w, acc, input_precision="ieee")
    return acc * tl.rsqrt(square / SIZE + eps)[:, None]


@triton.jit(do_not_specialize=["rows", "shift"])
def qkv_kernel(
    first, first_stride, first_norm, index, second, second_stride, second_norm,
    weight, bias, cos, sin, base, query, keys, values, head_stride, rows, shift, eps,
    SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    GATHER: tl.constexpr, TWO: tl.constexpr, BIAS: tl.constexpr,
    LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    WIDTH: tl.constexpr = 2 * SIZE if TWO else SIZE
    column = tl.program_id(0) * BLOCK_N
    head = column // DIM
    local = column % DIM + tl.arange(0, BLOCK_N)
    # Neighbours in the block are the two halves of one rotation: rows j and j + dim/2 of the head.
    row_of = head * DIM + local // 2 + (local % 2) * HALF
    weight_at = weight + row_of * WIDTH
    always = row_of >= 0
    _start_with_weights(weight_at, WIDTH, LINES, LINE, PDL)

    lane = tl.arange(0, LANES)
    live = lane < rows
    place = lane
    if GATHER:
        place = tl.load(index + lane, mask=live, other=0)
    y = _normed_product(
        first + place * first_stride, live, first_norm, weight_at, always, eps, SIZE, LANES, BLOCK_N, BLOCK_K
    )
    if TWO:
        y += _normed_product(
            second + lane * second_stride, live, second_norm, weight_at + SIZE, always, eps,
            SIZE, LANES, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if BIAS:
        y += tl.load(bias + row_of).to(tl.float32)[None, :]
    low, high = tl.split(tl.reshape(y, (LANES, BLOCK_N // 2, 2)))

    pair = (column % DIM) // 2 + tl.arange(0, BLOCK_N // 2)
    slot = tl.load(base) + shift + lane
    both = live[:, None] & (pair >= 0)[None, :]
    turn = slot[:, None] * DIM + HALF + pair[None, :]
    # v is not rotated: angle 0.
    turned = head < HEADS + KV_HEADS
    c = tl.where(turned, tl.load(cos + turn, mask=both, other=1.0), 1.0)
    s = tl.where(turned, tl.load(sin + turn, mask=both, other=0.0), 0.0)
    new_low = low * c - high * s
    new_high = high * c + low * s

    if head < HEADS:
        to_query = query + lane[:, None] * (HEADS * DIM) + head * DIM + pair[None, :]
        tl.store(to_query, new_low.to(query.dtype.element_ty), mask=both)
        tl.store(to_query + HALF, new_high.to(query.dtype.element_ty), mask=both)
    elif head < HEADS + KV_HEADS:
        to_keys = keys + (head - HEADS) * head_stride + slot[:, None] * DIM + pair[None, :]
        tl.store(to_keys, new_low.to(keys.dtype.element_ty), mask=both)
        tl.store(to_keys + HALF, new_high.to(keys.dtype.element_ty), mask=both)
    else:
        to_values = values + (head - HEADS - KV_HEADS) * head_stride + slot[:, None] * DIM + pair[None, :]
        tl.store(to_values, new_low.to(values.dtype.element_ty), mask=both)
        tl.store(to_values + HALF, new_high.to(values.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["rows", "shift"])
def attend_kernel(
    query, keys, values, base, out, part_out, part_best, part_total, head_stride, rows, shift, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # scale holds log2(e) / sqrt(dim), so that powers of two do for exp.
    follow(PDL)
    head = tl.program_id(0)
    part = tl.program_id(1)
    kv = head // GROUP
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIM)
    start = tl.load(base).to(tl.int32) + shift
    end = start + rows
    own = lane[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    live = (lane < rows)[:, None] & (dim >= 0)[None, :]
    q = tl.load(query + own, mask=live, other=0.0)
    best = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    acc = tl.zeros((LANES, DIM), tl.float32)
    for begin in range(part * BLOCK, end, SPLITS * BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        there = slot < end
        at = kv * head_stride + slot * DIM
        k = tl.load(keys + at[None, :] + dim[:, None], mask=there[None, :] & (dim >= 0)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(slot[None, :] <= start + lane[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A part of the context may hold nothing that a row sees.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(best - level)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + dim[None, :], mask=there[:, None] & (dim >= 0)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = higher
    if SPLITS == 1:
        tl.store(out + own, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)
    else:
        row = (head * SPLITS + part) * LANES + lane
        tl.store(part_best + row, best)
        tl.store(part_total + row, total)
        tl.store(part_out + row[:, None] * DIM + dim[None, :], acc)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    part_out, part_best, part_total, out, rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    head = tl.program_id(0)
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIM)
    best = tl.full((LANES,), float("-inf"), tl.float32)
    for part in tl.static_range(SPLITS):
        best = tl.maximum(best, tl.load(part_best + (head * SPLITS + part) * LANES + lane))
    total = tl.zeros((LANES,), tl.float32)
    acc = tl.zeros((LANES, DIM), tl.float32)
    for part in tl.static_range(SPLITS):
        row = (head * SPLITS + part) * LANES + lane
        weight = tl.exp2(tl.load(part_best + row) - best)
        total += tl.load(part_total + row) * weight
        acc += tl.load(part_out + row[:, None] * DIM + dim[None, :]) * weight[:, None]
    live = (lane < rows)[:, None] & (dim >= 0)[None, :]
    at = lane[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x, x_stride, weight, residual, residual_stride, out, out_stride, rows,
    N: tl.constexpr, SIZE: tl.constexpr, RESIDUAL: tl.constexpr, LANES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < N
    weight_at = weight + tl.minimum(column, N - 1) * SIZE
    _start_with_weights(weight_at, SIZE, LINES, LINE, PDL)
    lane = tl.arange(0, LANES)
    live = lane < rows
    acc = tl.zeros((LANES, BLOCK_N), tl.float32)
    span = tl.arange(0, BLOCK_K)
    for start in range(0, SIZE, BLOCK_K):
        at = start + span
        inside = at < SIZE
        a = tl.load(x + lane[:, None] * x_stride + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_at[None, :] + at[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    mask = live[:, None] & there[None, :]
    if RESIDUAL:
        acc += tl.load(residual + lane[:, None] * residual_stride + column[None, :], mask=mask, other=0.0)
    tl.store(out + lane[:, None] * out_stride + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def gate_up_kernel(
    x, x_stride, norm, weight, out, rows, eps,
    SIZE: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Neighbouring columns of the block are gate and up of one output, so that one product gives both.
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = local < 2 * WIDE
    safe = tl.minimum(local, 2 * WIDE - 1)
    weight_at = weight + (safe // 2 + (safe % 2) * WIDE) * SIZE
    _start_with_weights(weight_at, SIZE, LINES, LINE, PDL)
    lane = tl.arange(0, LANES)
    live = lane < rows
    y = _normed_product(x + lane * x_stride, live, norm, weight_at, there, eps, SIZE, LANES, BLOCK_N, BLOCK_K)
    gate, up = tl.split(tl.reshape(y, (LANES, BLOCK_N // 2, 2)))
    column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    mask = live[:, None] & (column < WIDE)[None, :]
    active = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + lane[:, None] * WIDE + column[None, :], active.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def vocab_kernel(
    x, x_stride, row, norm, weight, best_value, best_index, rows, eps,
    SIZE: tl.constexpr, VOCAB: tl.constexpr, PICK: tl.constexpr, LANES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < VOCAB
    weight_at = weight + tl.minimum(column, VOCAB - 1).to(tl.int64) * SIZE
    _start_with_weights(weight_at, SIZE, LINES, LINE, PDL)
    lane = tl.arange(0, LANES)
    live = lane < rows
    first = 0
    if PICK:
        first = tl.load(row).to(tl.int32)
    y = _normed_product(x + (first + lane) * x_stride, live, norm, weight_at, there, eps, SIZE, LANES, BLOCK_N, BLOCK_K)
    y = tl.where(there[None, :], y, float("-inf"))
    best = tl.max(y, 1)
    # The first of equals, as argmax has it.
    where = tl.min(tl.where(y == best[:, None], column[None, :], _LAST), 1)
    at = lane * tl.num_programs(0) + block
    tl.store(best_value + at, best, mask=live)
    tl.store(best_index + at, where, mask=live)
