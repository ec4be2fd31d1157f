"""The EAGLE-3 draft head (Li et al., arXiv 2503.01840) in the usual checkpoint layout.

Row t of the draft takes the embedding of token t+1 and a hidden state of position t and predicts token t+2. The
hidden state is fc(H[a], H[b], ...) of the target where the target has seen position t, and the draft's own output
before its final norm where it has not.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specmeter.eagle.config import DraftConfig
from specmeter.eagle.kv import KVCache
from specmeter.eagle.layer import Attention, Mlp, RmsNorm, Step, group_mask
from specmeter.eagle.linear import Int8Linear, Linear
from specmeter.eagle.rope import RotaryTable
from specmeter.eagle.target import Target
from specmeter.eagle.weights import Checkpoint
from specmeter.errors import SpecmeterError


class Draft:
    """An EAGLE-3 head that shares the target's embedding and has a reduced vocabulary of its own."""

    def __init__(
        self, config: DraftConfig, checkpoint: Checkpoint, target: Target, *, positions: int, int8: bool = False
    ) -> None:
        layer, layout, dtype = config.layer, target.layout, target.dtype
        size, eps, vocab = layer.hidden_size, layer.rms_norm_eps, config.draft_vocab_size
        self.config = config
        self.dtype = dtype
        self.embedding = target.embedding
        if "embed_tokens.weight" in checkpoint:
            self.embedding = checkpoint.take("embed_tokens.weight", (target.config.vocab_size, size), layout.weights)
        fused = (size, len(config.capture) * target.config.hidden_size)
        self.fc = layout.linear(checkpoint.take("fc.weight", fused, layout.weights))
        self.input_norm = RmsNorm(checkpoint, "midlayer.input_layernorm.weight", size, eps, dtype)
        self.hidden_norm = RmsNorm(checkpoint, "midlayer.hidden_norm.weight", size, eps, dtype)
        self.attention = Attention(layer, checkpoint, "midlayer.self_attn", 2 * size, layout)
        self.mlp_norm = RmsNorm(checkpoint, "midlayer.post_attention_layernorm.weight", size, eps, dtype)
        self.mlp = Mlp(layer, checkpoint, "midlayer.mlp", layout)
        self.norm = RmsNorm(checkpoint, "norm.weight", size, eps, dtype)
        output = checkpoint.take("lm_head.weight", (vocab, size), layout.weights)
        self.lm_head: Linear = Int8Linear(output) if int8 else layout.linear(output)
        self.target_ids = self._read_target_ids(checkpoint, target)
        self.rotary = RotaryTable(layer, positions, dtype, layout.device, pairs=layout.pairs)

    @classmethod
    def from_dir(
        cls, draft_dir: Path, config: DraftConfig, target: Target, *, positions: int, int8: bool = False
    ) -> Draft:
        """Loads the head in ``draft_dir``; SpecmeterError if it does not fit ``target``.

        ``int8`` keeps the output layer, more than half of a head's weights, in 8 bits. What the engine gives out is
        the same: the target checks every guess, and sampling accepts by the probabilities that were drawn from.
        """
        check_fit(config, target, draft_dir)
        return cls(config, Checkpoint(draft_dir, target.layout.device), target, positions=positions, int8=int8)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache with room for ``capacity`` tokens."""
        layer = self.config.layer
        return KVCache(1, layer.num_key_value_heads, capacity, layer.head_dim, self.dtype, self.embedding.device)

    def fuse(self, captured: Tensor) -> Tensor:
        """The draft's hidden input [rows, hidden] from the target's captured states [rows, n * hidden]."""
        return self.fc(captured)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, start: int
    ) -> Tensor:
        """The draft's output before its final norm [rows, hidden].

        ``tokens`` [rows] are target ids one position ahead of ``hidden`` [rows, hidden]; ``positions`` [rows] are
        those of ``hidden``. Writes cache slots start .. start+rows-1; ``mask`` as in Target.forward.
        """
        rows = tokens.shape[0]
        step = Step(rows, self.rotary.at(positions), group_mask(mask, self.config.layer))
        embedded = self.input_norm(F.embedding(tokens, self.embedding).to(self.dtype))
        both = torch.cat([embedded, self.hidden_norm(hidden)], dim=-1)
        (slots,) = cache.window(start, rows)
        x = self.attention.forward(both, hidden, step, slots)
        return self.mlp.forward(self.mlp_norm(x), x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary [rows, draft_vocab] from ``forward``'s output [rows, hidden]."""
        return self.lm_head(self.norm(hidden))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """By target id, as far as the draft knows any, its id in the draft's vocabulary; -1: it has none."""
        ids = self.target_ids.cpu().numpy()
        found = np.full(int(ids.max()) + 1, -1, np.int64)
        found[ids] = np.arange(len(ids))
        return found

    def _read_target_ids(self, checkpoint: Checkpoint, target: Target) -> Tensor:
        vocab, full = self.config.draft_vocab_size, target.config.vocab_size
        if "d2t" not in checkpoint:
            if vocab == full:
                return torch.arange(vocab, device=self.embedding.device)
            raise SpecmeterError(
                f"The head in {checkpoint.folder} has no d2t map.",
                f"Its vocabulary has {vocab} of the target's {full} tokens, so its ids cannot be told.",
                "Use a complete EAGLE-3 checkpoint.",
            )
        # d2t holds differences: target id = draft id + d2t[draft id].
        ids = checkpoint.take("d2t", (vocab,), torch.int64) + torch.arange(vocab, device=self.embedding.device)
        if int(ids.min()) < 0 or int(ids.max()) >= full:
            raise SpecmeterError(
                f"The d2t map in {checkpoint.folder} leaves the target's vocabulary.",
                f"Its ids run from {int(ids.min())} to {int(ids.max())}; the target has {full} tokens.",
                "Use a head trained for this target.",
            )
        return ids


def check_fit(config: DraftConfig, target: Target, draft_dir: Path) -> None:
    """SpecmeterError if the head's sizes do not fit the target's."""
    shape, layers = target.config, target.config.num_hidden_layers
    problems = []
    if config.layer.vocab_size != shape.vocab_size:
        problems.append(f"its vocabulary has {config.layer.vocab_size} tokens, the target's {shape.vocab_size}")
    if config.layer.hidden_size != shape.hidden_size:
        problems.append(f"its hidden size is {config.layer.hidden_size}, the target's {shape.hidden_size}")
    if config.draft_vocab_size > shape.vocab_size:
        problems.append(f"its draft vocabulary has {config.draft_vocab_size} tokens, more than the target's")
    if not all(0 <= k <= layers for k in config.capture):
        problems.append(f"it wants target states {list(config.capture)} of 0 to {layers}")
    if problems:
        raise SpecmeterError(
            f"The head in {draft_dir} does not fit the target.",
            ("; ".join(problems) + ".").capitalize(),
            "Name a head trained for this target.",
        )
