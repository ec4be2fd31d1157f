"""The target model: forward over new tokens, with the hidden states of chosen layers captured."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specmeter.eagle.config import LlamaConfig
from specmeter.eagle.kv import KVCache
from specmeter.eagle.layer import DecoderLayer, RmsNorm, Step, group_mask
from specmeter.eagle.linear import make_linear
from specmeter.eagle.rope import RotaryTable
from specmeter.eagle.weights import Checkpoint


class Target:
    """A Llama-family model for one sequence.

    ``capture`` lists the states that ``forward`` gives beside its own: k means H[k], where H[0] is the embedding
    output and H[k] the output of decoder layer k-1, before the final norm.
    """

    def __init__(
        self,
        config: LlamaConfig,
        checkpoint: Checkpoint,
        *,
        capture: tuple[int, ...] = (),
        positions: int,
        dtype: torch.dtype,
        packed: bool,
    ) -> None:
        size, vocab = config.hidden_size, config.vocab_size
        self.config = config
        self.capture = capture
        self.dtype = dtype
        self.embedding = checkpoint.take("model.embed_tokens.weight", (vocab, size), dtype)
        self.layers = [
            DecoderLayer(config, checkpoint, f"model.layers.{i}", dtype, packed)
            for i in range(config.num_hidden_layers)
        ]
        self.norm = RmsNorm(checkpoint, "model.norm.weight", size, config.rms_norm_eps, dtype)
        untied = "lm_head.weight" in checkpoint and not config.tie_word_embeddings
        head = checkpoint.take("lm_head.weight", (vocab, size), dtype) if untied else self.embedding
        self.lm_head = make_linear(head, packed=packed)
        self.rotary = RotaryTable(config, positions, dtype)

    @classmethod
    def from_dir(
        cls, model_dir: Path, *, capture: tuple[int, ...], positions: int, dtype: torch.dtype, packed: bool
    ) -> Target:
        """Loads a Hugging Face style directory; SpecmeterError if it does not hold such a model."""
        config = LlamaConfig.from_dir(model_dir)
        return cls(config, Checkpoint(model_dir), capture=capture, positions=positions, dtype=dtype, packed=packed)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache with room for ``capacity`` tokens."""
        c = self.config
        return KVCache(c.num_hidden_layers, c.num_key_value_heads, capacity, c.head_dim, self.dtype)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, start: int, *, capture: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Runs ``tokens`` [rows] at ``positions`` [rows], writing cache slots start .. start+rows-1.

        ``mask`` is additive [rows, start + rows] and may be None for a single row. Returns the state after the last
        layer [rows, hidden] and, if ``capture``, the captured states side by side [rows, len(capture) * hidden].
        """
        rows = tokens.shape[0]
        cos, sin = self.rotary.at(positions)
        step = Step(rows, cos, sin, group_mask(mask, self.config))
        x = F.embedding(tokens, self.embedding)
        states = {0: x}
        for index, (layer, slots) in enumerate(zip(self.layers, cache.window(start, rows), strict=True), 1):
            x = states[index] = layer.forward(x, step, slots)
        captured = torch.cat([states[k] for k in self.capture], dim=-1) if capture else None
        return x, captured

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [rows, vocab] from states after the last layer [rows, hidden]."""
        return self.lm_head(self.norm(hidden))
