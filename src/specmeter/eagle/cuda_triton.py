"""The operations of ``cuda_ops`` by Triton kernels. Imports Triton, so it is imported only where CUDA is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specmeter.eagle import cuda_kernels as kernels
from specmeter.eagle import cuda_kernels_book as book_kernels
from specmeter.eagle.cuda_ops import LANES, Counters, Inputs, Place
from specmeter.eagle.cuda_weights import LayerWeights, OutputWeights
from specmeter.eagle.draft import Draft
from specmeter.eagle.target import Target

LINE_BYTES = 128


@dataclass(frozen=True)
class Tuning:
    """Sizes of the kernels' blocks: output columns of a product, of the vocabulary, elements of K, keys of attention.

    ``pdl`` starts each kernel while the one before it still runs (Hopper and later).
    """

    columns: int = 16
    vocab_columns: int = 64
    inner: int = 128
    keys: int = 128
    warps: int = 4
    stages: int = 5
    pdl: bool = False


class TritonOps:
    """The operations by Triton. Scratch buffers are made at the first call, so a pass must run once before capture."""

    name = "triton"

    def __init__(self, tuning: Tuning | None = None) -> None:
        self.tuning = tuning or Tuning()
        self._scratch: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._launch = {"num_warps": self.tuning.warps, "num_stages": self.tuning.stages}
        if self.tuning.pdl:
            self._launch["launch_pdl"] = True

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor, rows: int) -> None:
        size = table.shape[1]
        book_kernels.embed_kernel[(rows,)](
            table, tokens, out, out.stride(0), rows, SIZE=size, BLOCK=_power(size), PDL=self.tuning.pdl, **self._launch
        )

    def qkv(self, inputs: Inputs, layer: LayerWeights, place: Place, query: Tensor) -> None:
        x, dim, two = inputs.x, layer.head_dim, inputs.other is not None
        other = x if inputs.other is None else inputs.other
        columns = min(self.tuning.columns, dim)
        kernels.qkv_kernel[(layer.qkv.shape[0] // columns,)](
            x,
            x.stride(0),
            layer.input_norm,
            place.base if inputs.index is None else inputs.index,
            other,
            other.stride(0),
            layer.input_norm if layer.hidden_norm is None else layer.hidden_norm,
            layer.qkv,
            layer.qkv if layer.qkv_bias is None else layer.qkv_bias,
            layer.cos,
            layer.sin,
            place.base,
            query,
            layer.keys,
            layer.values,
            layer.keys.stride(0),
            place.rows,
            place.shift,
            layer.eps,
            SIZE=x.shape[1],
            HEADS=layer.heads,
            KV_HEADS=layer.kv_heads,
            DIM=dim,
            GATHER=inputs.index is not None,
            TWO=two,
            BIAS=layer.qkv_bias is not None,
            **self._blocks(layer.qkv, columns),
        )

    def attention(self, query: Tensor, layer: LayerWeights, place: Place, out: Tensor) -> None:
        heads, dim, splits = layer.heads, layer.head_dim, place.splits
        rows = heads * splits * LANES if splits > 1 else 1
        part_out, part_best, part_total = (
            self._buffer(query.device, torch.float32, size, tag)
            for tag, size in ((0, rows * dim), (1, rows), (2, rows))
        )
        kernels.attend_kernel[(heads, splits)](
            query,
            layer.keys,
            layer.values,
            place.base,
            out,
            part_out,
            part_best,
            part_total,
            layer.keys.stride(0),
            place.rows,
            place.shift,
            math.log2(math.e) / math.sqrt(dim),
            HEADS=heads,
            GROUP=heads // layer.kv_heads,
            DIM=dim,
            LANES=LANES,
            BLOCK=self.tuning.keys,
            SPLITS=splits,
            PDL=self.tuning.pdl,
            **{**self._launch, "num_stages": 2},
        )
        if splits > 1:
            kernels.combine_kernel[(heads,)](
                part_out,
                part_best,
                part_total,
                out,
                place.rows,
                HEADS=heads,
                DIM=dim,
                LANES=LANES,
                SPLITS=splits,
                PDL=self.tuning.pdl,
                **self._launch,
            )

    def product(self, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, rows: int) -> None:
        beside = out if residual is None else residual
        columns = self.tuning.columns
        kernels.product_kernel[(triton.cdiv(weight.shape[0], columns),)](
            x,
            x.stride(0),
            weight,
            beside,
            beside.stride(0),
            out,
            out.stride(0),
            rows,
            N=weight.shape[0],
            SIZE=weight.shape[1],
            RESIDUAL=residual is not None,
            **self._blocks(weight, columns),
        )

    def gate_up(self, x: Tensor, layer: LayerWeights, out: Tensor, rows: int) -> None:
        both, columns = layer.gate_up.shape[0], 2 * self.tuning.columns
        kernels.gate_up_kernel[(triton.cdiv(both, columns),)](
            x,
            x.stride(0),
            layer.mlp_norm,
            layer.gate_up,
            out,
            rows,
            layer.eps,
            SIZE=layer.gate_up.shape[1],
            WIDE=both // 2,
            **self._blocks(layer.gate_up, columns),
        )

    def choose(
        self, x: Tensor, row: Tensor | None, output: OutputWeights, out: Tensor, rows: int, keep: Tensor | None
    ) -> None:
        vocab, size = output.lm_head.shape
        columns = self.tuning.vocab_columns
        blocks = triton.cdiv(vocab, columns)
        values = self._buffer(x.device, torch.float32, LANES * blocks, 3)
        indices = self._buffer(x.device, torch.int32, LANES * blocks, 4)
        first = indices if row is None else row
        kernels.vocab_kernel[(blocks,)](
            x,
            x.stride(0),
            first,
            output.norm,
            output.lm_head,
            values,
            indices,
            rows,
            output.eps,
            SIZE=size,
            VOCAB=vocab,
            PICK=row is not None,
            **self._blocks(output.lm_head, columns),
        )
        book_kernels.take_kernel[(rows,)](
            values,
            indices,
            indices if output.ids is None else output.ids,
            out,
            x,
            x.stride(0),
            first,
            x if keep is None else keep,
            blocks,
            vocab - 1,
            BLOCKS=_power(blocks),
            MAP=output.ids is not None,
            KEEP=keep is not None,
            SIZE=size,
            BLOCK=_power(size),
            PDL=self.tuning.pdl,
            **self._launch,
        )

    def accept(self, book: Counters, steps: int) -> None:
        book_kernels.accept_kernel[(1,)](
            book.tokens,
            book.chosen,
            book.base,
            book.past,
            book.kept,
            book.result,
            steps,
            LANES=LANES,
            PDL=self.tuning.pdl,
            **{**self._launch, "num_warps": 1},
        )

    def _blocks(self, weight: Tensor, columns: int) -> dict[str, int]:
        # What every product takes: its blocks, and how the L2 prefetch walks a row of its weights.
        line = LINE_BYTES // weight.element_size()
        return {
            "LANES": LANES,
            "BLOCK_N": columns,
            "BLOCK_K": self.tuning.inner,
            "LINES": _power(triton.cdiv(weight.shape[1], line)),
            "LINE": line,
            "PDL": self.tuning.pdl,
            **self._launch,
        }

    def _buffer(self, device: torch.device, dtype: torch.dtype, size: int, tag: int) -> Tensor:
        found = self._scratch.get((device, dtype, tag))
        if found is None or found.numel() < size:
            if found is not None:
                # A graph captured before still writes there.
                self._outgrown.append(found)
            found = self._scratch[device, dtype, tag] = torch.empty(size, dtype=dtype, device=device)
        return found


def why_not(target: Target, draft: Draft | None) -> str | None:
    """Why the kernels cannot run these models, or None if they can."""
    for config in (target.config, *(() if draft is None else (draft.config.layer,))):
        dim = config.head_dim
        if dim < LANES or dim & (dim - 1):
            return f"the heads have {dim} dimensions, not a power of two of at least {LANES}"
    if target.layers[0].attention.q_norm is not None:
        return "the model normalizes each q and k head"
    return None


def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))
