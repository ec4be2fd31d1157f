"""What a decode pass is made of, as a few fused operations over static buffers.

``Ops`` names them; ``TorchOps`` writes each with torch's own operators and runs on any device: it is the reference of
the Triton kernels (``cuda_triton``), the path of tests without a GPU, and the fallback inside CUDA graphs where Triton
is missing or a model has a shape that its kernels do not know. No operation looks at a value on the host, and no shape
depends on data, so each can be captured in a graph.

Buffers hold LANES rows, of which the first ``rows`` count. Positions are read from a device tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmeter.eagle.cuda_weights import LayerWeights, OutputWeights

LANES = 16
"""Rows of every buffer: the widest verify pass, and the least number of rows a tensor core multiplies."""


@dataclass(frozen=True)
class Place:
    """Where the rows of a pass stand: row r at position and cache slot ``base`` [1] + ``shift`` + r.

    ``splits`` is the number of parts that attention cuts the context into.
    """

    base: Tensor
    shift: int
    rows: int
    splits: int = 1


@dataclass(frozen=True)
class Inputs:
    """Input of a layer: rows of ``x`` [LANES, hidden], or of a table by ``index`` [LANES]; a draft layer's other half
    in ``other`` [LANES, hidden]."""

    x: Tensor
    index: Tensor | None = None
    other: Tensor | None = None


@dataclass(frozen=True)
class Counters:
    """The device's own book of one sequence, int64.

    ``tokens`` [LANES + 1]: the last token given out, then the draft's. ``chosen`` [LANES]: the target's most probable
    token after each of them. ``base`` [1]: tokens in the caches; ``past`` [1]: the same before the last accept.
    ``kept`` [1]: drafts accepted. ``result`` [LANES + 1]: kept, then chosen; what the host reads.
    """

    tokens: Tensor
    chosen: Tensor
    base: Tensor
    past: Tensor
    kept: Tensor
    result: Tensor


class Ops(Protocol):
    """The operations. All write into the buffers they are given and return nothing."""

    name: str

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor, rows: int) -> None:
        """out[r] = table[tokens[r]]."""

    def qkv(self, inputs: Inputs, layer: LayerWeights, place: Place, query: Tensor) -> None:
        """Norm, the q, k and v product, rotation; q to ``query`` [LANES, heads * dim], k and v to the layer's cache."""

    def attention(self, query: Tensor, layer: LayerWeights, place: Place, out: Tensor) -> None:
        """Each row attends to the cache's slots up to its own; to ``out`` [LANES, heads * dim]."""

    def product(self, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, rows: int) -> None:
        """out = x weight^T (+ residual)."""

    def gate_up(self, x: Tensor, layer: LayerWeights, out: Tensor, rows: int) -> None:
        """out = silu(gate) * up of the normed ``x``, to [LANES, intermediate]."""

    def choose(
        self, x: Tensor, row: Tensor | None, output: OutputWeights, out: Tensor, rows: int, keep: Tensor | None
    ) -> None:
        """The most probable token after each row of ``x``, the first of equals, to ``out`` [rows] or more.

        With ``row`` [1] only that row counts, and with ``keep`` [LANES, hidden] it is copied to keep[0].
        """

    def accept(self, book: Counters, steps: int) -> None:
        """Counts the drafts that agree with the target, and moves the book on."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in float32, in the dtype of ``x``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class TorchOps:
    """The operations by torch's operators."""

    name = "torch"

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor, rows: int) -> None:
        out[:rows].copy_(F.embedding(tokens[:rows], table))

    def qkv(self, inputs: Inputs, layer: LayerWeights, place: Place, query: Tensor) -> None:
        rows, heads, kv_heads, dim = place.rows, layer.heads, layer.kv_heads, layer.head_dim
        x = inputs.x[:rows] if inputs.index is None else F.embedding(inputs.index[:rows], inputs.x)
        normed = rms_norm(x, layer.input_norm, layer.eps)
        if inputs.other is not None and layer.hidden_norm is not None:
            normed = torch.cat([normed, rms_norm(inputs.other[:rows], layer.hidden_norm, layer.eps)], -1)
        both = F.linear(normed, layer.qkv, layer.qkv_bias).view(rows, heads + 2 * kv_heads, dim)
        turned = torch.cat(self._normed_heads(both, layer), 1).float()
        positions = _positions(place)
        cos, sin = layer.cos[positions][:, None], layer.sin[positions][:, None]
        turned = (turned * cos + torch.roll(turned, dim // 2, -1) * sin).to(both.dtype)
        query[:rows].copy_(turned[:, :heads].reshape(rows, heads * dim))
        layer.keys.index_copy_(1, positions, turned[:, heads:].transpose(0, 1))
        layer.values.index_copy_(1, positions, both[:, heads + kv_heads :].transpose(0, 1))

    def attention(self, query: Tensor, layer: LayerWeights, place: Place, out: Tensor) -> None:
        rows, kv_heads, dim = place.rows, layer.kv_heads, layer.head_dim
        group = layer.heads // kv_heads
        slots = torch.arange(layer.keys.shape[1], device=query.device)
        seen = slots[None] <= _positions(place)[:, None]
        # Over the whole cache: a shape that followed the context could not be captured.
        mixed = F.scaled_dot_product_attention(
            query[:rows].view(rows, kv_heads, group, dim).permute(1, 2, 0, 3),
            layer.keys[:, None].expand(-1, group, -1, -1),
            layer.values[:, None].expand(-1, group, -1, -1),
            seen,
        )
        out[:rows].copy_(mixed.permute(2, 0, 1, 3).reshape(rows, layer.heads * dim))

    def product(self, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, rows: int) -> None:
        result = F.linear(x[:rows], weight)
        out[:rows].copy_(result if residual is None else result + residual[:rows])

    def gate_up(self, x: Tensor, layer: LayerWeights, out: Tensor, rows: int) -> None:
        gate, up = F.linear(rms_norm(x[:rows], layer.mlp_norm, layer.eps), layer.gate_up).chunk(2, -1)
        out[:rows].copy_(F.silu(gate) * up)

    def choose(
        self, x: Tensor, row: Tensor | None, output: OutputWeights, out: Tensor, rows: int, keep: Tensor | None
    ) -> None:
        picked = x[:rows] if row is None else x.index_select(0, row)
        if keep is not None:
            keep[:1].copy_(picked)
        best = F.linear(rms_norm(picked, output.norm, output.eps), output.lm_head).float().argmax(-1)
        out[:rows].copy_(best if output.ids is None else output.ids.index_select(0, best))

    def accept(self, book: Counters, steps: int) -> None:
        agreed = (book.tokens[1 : steps + 1] == book.chosen[:steps]).long()
        book.kept.copy_(agreed.cumprod(0).sum().view(1))
        book.result[:1].copy_(book.kept)
        book.result[1 : steps + 2].copy_(book.chosen[: steps + 1])
        book.tokens[:1].copy_(book.chosen.index_select(0, book.kept))
        book.past.copy_(book.base)
        book.base.add_(book.kept).add_(1)

    @staticmethod
    def _normed_heads(both: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        q, k = both[:, : layer.heads], both[:, layer.heads : layer.heads + layer.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, layer.eps), rms_norm(k, layer.k_norm, layer.eps)
        return q, k


def _positions(place: Place) -> Tensor:
    return torch.arange(place.shift, place.shift + place.rows, device=place.base.device) + place.base
