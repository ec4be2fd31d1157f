"""The passes of decoding, each a fixed sequence of operations over static buffers: what a CUDA graph holds.

A pass takes everything that changes from the device: tokens, positions, how many drafts were kept. So the same graph
serves every cycle, and the host need not know the outcome of one before it starts the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmeter.eagle.cuda_ops import LANES, Counters, Inputs, Ops, Place
from specmeter.eagle.cuda_weights import DraftWeights, LayerWeights, TargetWeights


@dataclass(frozen=True)
class Scratch:
    """Buffers inside a layer, [LANES, n]: q, attention's output, the state before the MLP, the MLP's inside."""

    query: Tensor
    mixed: Tensor
    middle: Tensor
    active: Tensor


class Passes:
    """Target, draft and the buffers of one sequence."""

    def __init__(self, ops: Ops, target: TargetWeights, draft: DraftWeights | None) -> None:
        self.ops = ops
        self.target = target
        self.draft_head = draft
        like, hidden = target.embedding, target.embedding.shape[1]
        self.book = new_book(like.device)
        # One buffer serves all layers but those whose output feeds the draft: each of these writes its own columns.
        self.states = like.new_zeros(LANES, max(1, len(target.capture)) * hidden)
        plain = like.new_zeros(LANES, hidden)
        columns = {k: self.states[:, i * hidden : (i + 1) * hidden] for i, k in enumerate(target.capture)}
        self.outputs = [columns.get(k, plain) for k in range(len(target.layers) + 1)]
        self.inner = _scratch(target.layers[0])
        if draft is not None:
            self.draft_inner = _scratch(draft.layer)
            self.fused, self.grown, self.hidden = (like.new_zeros(LANES, hidden) for _ in range(3))

    # -- the passes; each can cut attention's context into ``splits`` parts ---------------------------------------

    def draft(self, steps: int, splits: int = 1) -> None:
        """Draft steps 2 to ``steps``; step 1 is the last extend's. Each writes one slot beyond the kept tokens."""
        head = self._head()
        for step in range(1, steps):
            place = Place(self.book.base, step - 1, 1, splits)
            inputs = Inputs(head.embedding, self.book.tokens[step:], self.hidden)
            self._layer(head.layer, inputs, self.hidden, self.hidden, place, self.draft_inner)
            self.ops.choose(self.hidden, None, head.output, self.book.tokens[step + 1 :], 1, None)

    def verify(self, steps: int, splits: int = 1) -> None:
        """The target over the last token and ``steps`` drafts; 0 steps is plain decoding."""
        place = Place(self.book.base, 0, steps + 1, splits)
        self.ops.embed(self.target.embedding, self.book.tokens, self.outputs[0], place.rows)
        for index, layer in enumerate(self.target.layers):
            x, out = self.outputs[index], self.outputs[index + 1]
            self._layer(layer, Inputs(x), x, out, place, self.inner)
        self.ops.choose(self.outputs[-1], None, self.target.output, self.book.chosen, place.rows, None)

    def accept(self, steps: int) -> None:
        """How many drafts the target agrees with; the caches' length moves on, so what was rejected is overwritten."""
        self.ops.accept(self.book, steps)

    def extend(self, steps: int, splits: int = 1) -> None:
        """The draft over all verified tokens with the target's states, then step 1 of the next draft from the last
        kept one. Rows beyond it write slots that the next draft and extend overwrite."""
        head, rows = self._head(), steps + 1
        self.ops.product(self.states, head.fc, None, self.fused, rows)
        inputs = Inputs(head.embedding, self.book.chosen, self.fused)
        place = Place(self.book.past, 0, rows, splits)
        self._layer(head.layer, inputs, self.fused, self.grown, place, self.draft_inner)
        self.ops.choose(self.grown, self.book.kept, head.output, self.book.tokens[1:], 1, self.hidden)

    def plain(self, splits: int = 1) -> None:
        """One step of plain decoding."""
        self.verify(0, splits)
        self.accept(0)

    # -- between requests -----------------------------------------------------------------------------------------

    def begin(self, pending: int, length: int, draft_logits: Tensor, draft_hidden: Tensor) -> None:
        """Sets the book after a prompt of ``length`` tokens whose next token is ``pending``.

        ``draft_logits`` [1, draft_vocab] and ``draft_hidden`` [1, hidden] are the draft's over the prompt's last
        position; empty without speculation.
        """
        self.book.tokens[:1].fill_(pending)
        self.book.base.fill_(length)
        if draft_logits.numel():
            ids = self._head().output.ids
            best = draft_logits.float().argmax(-1)
            self.book.tokens[1:2].copy_(best if ids is None else ids.index_select(0, best))
            self.hidden[:1].copy_(draft_hidden)

    def clear(self) -> None:
        """Zeroes the book, so that a trial run of a pass touches the first slots only."""
        for tensor in (self.book.tokens, self.book.chosen, self.book.base, self.book.past, self.book.kept):
            tensor.zero_()

    def _layer(
        self, layer: LayerWeights, inputs: Inputs, residual: Tensor, out: Tensor, place: Place, inner: Scratch
    ) -> None:
        self.ops.qkv(inputs, layer, place, inner.query)
        self.ops.attention(inner.query, layer, place, inner.mixed)
        self.ops.product(inner.mixed, layer.output, residual, inner.middle, place.rows)
        self.ops.gate_up(inner.middle, layer, inner.active, place.rows)
        self.ops.product(inner.active, layer.down, inner.middle, out, place.rows)

    def _head(self) -> DraftWeights:
        assert self.draft_head is not None, "Engine.generate lets no speculative request in without a draft head"
        return self.draft_head


def new_book(device: torch.device) -> Counters:
    """An empty book on ``device``."""

    def zeros(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    return Counters(zeros(LANES + 1), zeros(LANES), zeros(1), zeros(1), zeros(1), zeros(LANES + 1))


def _scratch(layer: LayerWeights) -> Scratch:
    like, width = layer.output, layer.heads * layer.head_dim
    sizes = (width, width, like.shape[0], layer.down.shape[1])
    return Scratch(*(like.new_zeros(LANES, size) for size in sizes))
