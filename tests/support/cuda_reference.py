"""The device engine's operations in float64, written apart from the engine, and random layers to try them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specmeter.eagle.cuda_ops import LANES, Inputs, Ops, Place
from specmeter.eagle.cuda_passes import new_book
from specmeter.eagle.cuda_weights import LayerWeights, OutputWeights


@dataclass(frozen=True)
class Size:
    """Shape of a random layer."""

    hidden: int = 576
    wide: int = 1536
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    vocab: int = 5000
    capacity: int = 700


SMALL = Size(hidden=48, wide=80, heads=4, kv_heads=2, dim=16, vocab=150, capacity=70)


class Bench:
    """Random weights and inputs on one device and dtype, drawn from ``seed``."""

    def __init__(self, size: Size, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.size, self.device, self.dtype = size, device, dtype
        self._generator = torch.Generator().manual_seed(seed)
        self.single = self._layer(1)
        self.double = replace(self._layer(2), hidden_norm=self.draw(size.hidden, dtype=torch.float32) + 1)

    def draw(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype or self.dtype).to(self.device)

    def ids(self, count: int, below: int) -> Tensor:
        """Random int64 numbers from 0 to ``below`` - 1."""
        return torch.randint(below, (count,), generator=self._generator).to(self.device)

    def place(self, length: int, rows: int, shift: int = 0, splits: int = 1) -> Place:
        """Rows after ``length`` tokens."""
        return Place(torch.tensor([length], device=self.device), shift, rows, splits)

    def output(self, ids: bool) -> OutputWeights:
        """An output layer, perhaps with a map of its ids."""
        s = self.size
        table = self.ids(s.vocab, 10 * s.vocab) if ids else None
        norm = self.draw(s.hidden, dtype=torch.float32) + 1
        return OutputWeights(norm, 1e-5, self.draw(s.vocab, s.hidden, scale=s.hidden**-0.5), table)

    def poison(self, *shape: int) -> Tensor:
        """A buffer of NaN: what is not written shows."""
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def _layer(self, inputs: int) -> LayerWeights:
        s = self.size
        rows = (s.heads + 2 * s.kv_heads) * s.dim
        angles = torch.arange(s.capacity)[:, None] / 1000.0 ** (torch.arange(s.dim // 2) * 2 / s.dim)
        cos, sin = angles.cos().to(self.device), angles.sin().to(self.device)
        return LayerWeights(
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.dim,
            eps=1e-5,
            input_norm=self.draw(s.hidden, dtype=torch.float32) + 1,
            hidden_norm=None,
            qkv=self.draw(rows, inputs * s.hidden, scale=s.hidden**-0.5),
            qkv_bias=self.draw(rows) if inputs == 1 else None,
            q_norm=None,
            k_norm=None,
            output=self.draw(s.hidden, s.heads * s.dim, scale=(s.heads * s.dim) ** -0.5),
            mlp_norm=self.draw(s.hidden, dtype=torch.float32) + 1,
            gate_up=self.draw(2 * s.wide, s.hidden, scale=s.hidden**-0.5),
            down=self.draw(s.hidden, s.wide, scale=s.wide**-0.5),
            keys=self.draw(s.kv_heads, s.capacity, s.dim),
            values=self.draw(s.kv_heads, s.capacity, s.dim),
            cos=torch.cat([cos, cos], 1),
            sin=torch.cat([-sin, sin], 1),
        )


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite where a number is missing."""
    distance = float((got.double() - want.double()).norm() / want.double().norm())
    return distance if distance == distance else float("inf")


def check_embed(ops: Ops, bench: Bench, rows: int) -> float:
    s = bench.size
    table, tokens, out = bench.draw(s.vocab, s.hidden), bench.ids(LANES, s.vocab), bench.poison(LANES, s.hidden)
    ops.embed(table, tokens, out, rows)
    return error(out[:rows], table[tokens[:rows]])


def check_qkv(ops: Ops, bench: Bench, rows: int, *, draft: bool, length: int = 33, shift: int = 0) -> float:
    s, layer = bench.size, bench.double if draft else bench.single
    x, other = bench.draw(s.vocab if draft else LANES, s.hidden), bench.draw(LANES, s.hidden)
    index = bench.ids(LANES, s.vocab)
    query = bench.poison(LANES, s.heads * s.dim)
    keys, values = layer.keys.clone(), layer.values.clone()
    ops.qkv(Inputs(x, index, other) if draft else Inputs(x), layer, bench.place(length, rows, shift), query)
    normed = norm(x[index[:rows]] if draft else x[:rows], layer.input_norm, layer.eps)
    if layer.hidden_norm is not None:
        normed = torch.cat([normed, norm(other[:rows], layer.hidden_norm, layer.eps)], 1)
    y = normed @ layer.qkv.double().T
    if layer.qkv_bias is not None:
        y = y + layer.qkv_bias.double()
    y = y.view(rows, -1, s.dim)
    at = slice(length + shift, length + shift + rows)
    cos, sin = layer.cos[at].double()[:, None], layer.sin[at].double()[:, None]
    turned = y * cos + torch.roll(y, s.dim // 2, -1) * sin
    keys[:, at] = turned[:, s.heads : s.heads + s.kv_heads].transpose(0, 1).to(bench.dtype)
    values[:, at] = y[:, s.heads + s.kv_heads :].transpose(0, 1).to(bench.dtype)
    wanted = (turned[:, : s.heads].reshape(rows, -1), keys, values)
    # The whole cache: a write elsewhere than in the rows' own slots is an error too.
    return max(map(error, (query[:rows], layer.keys, layer.values), wanted))


def check_attention(ops: Ops, bench: Bench, rows: int, *, length: int, splits: int = 1, shift: int = 0) -> float:
    s, layer = bench.size, bench.single
    query, out = bench.draw(LANES, s.heads * s.dim), bench.poison(LANES, s.heads * s.dim)
    ops.attention(query, layer, bench.place(length, rows, shift, splits), out)
    q = query[:rows].double().view(rows, s.heads, s.dim)
    group = s.heads // s.kv_heads
    keys, values = (t.double().repeat_interleave(group, 0) for t in (layer.keys, layer.values))
    scores = torch.einsum("rhd,hnd->hrn", q, keys) / s.dim**0.5
    slots = torch.arange(s.capacity, device=bench.device)
    own = length + shift + torch.arange(rows, device=bench.device)
    weights = scores.masked_fill(slots[None, None] > own[None, :, None], float("-inf")).softmax(-1)
    return error(out[:rows], torch.einsum("hrn,hnd->rhd", weights, values).reshape(rows, -1))


def check_product(ops: Ops, bench: Bench, rows: int, *, residual: bool) -> float:
    s, weight = bench.size, bench.single.down
    # Rows of wider buffers, as the captured states are.
    x, beside = bench.draw(LANES, 2 * s.wide)[:, : s.wide], bench.draw(LANES, 3 * s.hidden)[:, s.hidden : 2 * s.hidden]
    out = bench.poison(LANES, 2 * s.hidden)[:, : s.hidden]
    ops.product(x, weight, beside if residual else None, out, rows)
    want = x[:rows].double() @ weight.double().T
    return error(out[:rows], want + beside[:rows].double() if residual else want)


def check_gate_up(ops: Ops, bench: Bench, rows: int) -> float:
    s, layer = bench.size, bench.single
    x, out = bench.draw(LANES, s.hidden), bench.poison(LANES, s.wide)
    ops.gate_up(x, layer, out, rows)
    gate, up = (norm(x[:rows], layer.mlp_norm, layer.eps) @ layer.gate_up.double().T).chunk(2, 1)
    return error(out[:rows], gate * torch.sigmoid(gate) * up)


def check_choose(ops: Ops, bench: Bench, rows: int, *, picked: bool) -> float:
    """How far below the largest logit (in its standard deviations) the chosen tokens lie, plus faults of the copy."""
    s, output = bench.size, bench.output(ids=picked)
    x, keep = bench.draw(LANES, s.hidden), bench.poison(LANES, s.hidden)
    row = torch.tensor([rows - 1], device=bench.device) if picked else None
    out = torch.full((LANES,), -1, device=bench.device)
    ops.choose(x, row, output, out, 1 if picked else rows, keep if picked else None)
    chosen, inputs = (out[:1], x[rows - 1 : rows]) if picked else (out[:rows], x[:rows])
    logits = norm(inputs, output.norm, output.eps) @ output.lm_head.double().T
    if output.ids is None:
        taken = logits.gather(1, chosen[:, None])[:, 0]
    else:
        # Several draft ids may map to one target id: any of them.
        mapped = torch.where(output.ids[None] == chosen[:, None], logits, float("-inf"))
        taken = mapped.amax(1)
    copied = error(keep[:1], inputs) if picked else 0.0
    return float(((logits.amax(1) - taken) / logits.std(1)).max()) + copied


def check_accept(ops: Ops, bench: Bench, steps: int, agreed: int) -> float:
    """0 if the book is what it must be after ``agreed`` of ``steps`` drafts."""
    book = new_book(torch.device(bench.device))
    book.chosen.copy_(torch.arange(100, 100 + LANES))
    book.tokens[1:].copy_(book.chosen)
    book.tokens[agreed + 1 : steps + 1] += 50
    book.base.fill_(7)
    ops.accept(book, steps)
    wrong = [
        book.kept.tolist() != [agreed],
        book.past.tolist() != [7],
        book.base.tolist() != [7 + agreed + 1],
        book.tokens[:1].tolist() != [100 + agreed],
        book.result[: steps + 2].tolist() != [agreed, *range(100, 100 + steps + 1)],
    ]
    return float(sum(wrong))


def check_same_rows(ops: Ops, bench: Bench) -> float:
    """0 if the numbers of a row are the same bit for bit alone and among 15 others, through a whole layer.

    The row's own context ends a block of keys before that of the last row.
    """
    s, layer, row = bench.size, bench.single, 5
    length = 120 if s.capacity > 200 else 40
    x = bench.draw(LANES, s.hidden)
    single = x.clone()
    single[0] = x[row]

    def run(x: Tensor, rows: int, at: int) -> list[Tensor]:
        sizes = (s.heads * s.dim, s.heads * s.dim, s.hidden, s.wide, s.hidden)
        query, mixed, middle, active, out = buffers = [bench.poison(LANES, size) for size in sizes]
        place = bench.place(at, rows)
        ops.qkv(Inputs(x), layer, place, query)
        ops.attention(query, layer, place, mixed)
        ops.product(mixed, layer.output, x, middle, rows)
        ops.gate_up(middle, layer, active, rows)
        ops.product(active, layer.down, middle, out, rows)
        return buffers

    many, alone = run(x, LANES, length), run(single, 1, length + row)
    return max(float((m[row].double() - a[0].double()).abs().max()) for m, a in zip(many, alone, strict=True))


Check = Callable[[Ops, Bench], float]
CHECKS: dict[str, Check] = {
    "embed": lambda o, b: check_embed(o, b, 4),
    "qkv": lambda o, b: check_qkv(o, b, 4, draft=False),
    "qkv 1 row": lambda o, b: check_qkv(o, b, 1, draft=False),
    "qkv draft": lambda o, b: check_qkv(o, b, 5, draft=True),
    "qkv draft shifted": lambda o, b: check_qkv(o, b, 1, draft=True, shift=2),
    "attention": lambda o, b: check_attention(o, b, 4, length=b.size.capacity - 10),
    "attention at 0": lambda o, b: check_attention(o, b, 3, length=0),
    "attention shifted": lambda o, b: check_attention(o, b, 1, length=31, shift=1),
    "attention 16 rows": lambda o, b: check_attention(o, b, 16, length=b.size.capacity - 20),
    "attention split": lambda o, b: check_attention(o, b, 4, length=b.size.capacity - 10, splits=8),
    "attention split, short": lambda o, b: check_attention(o, b, 4, length=3, splits=8),
    "product": lambda o, b: check_product(o, b, 4, residual=False),
    "product + residual": lambda o, b: check_product(o, b, 7, residual=True),
    "gate_up": lambda o, b: check_gate_up(o, b, 4),
    "choose": lambda o, b: check_choose(o, b, 4, picked=False),
    "choose one row": lambda o, b: check_choose(o, b, 3, picked=True),
    "accept none": lambda o, b: check_accept(o, b, 3, 0),
    "accept some": lambda o, b: check_accept(o, b, 5, 2),
    "accept all": lambda o, b: check_accept(o, b, 3, 3),
    "accept plain": lambda o, b: check_accept(o, b, 0, 0),
    "accept 15": lambda o, b: check_accept(o, b, 15, 15),
}
"""Every operation, as a function of operations and a bench that gives the relative error."""
