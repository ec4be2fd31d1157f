"""The target model: forward over new tokens, with the hidden states of chosen layers captured."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specmeter.eagle.config import LlamaConfig
from specmeter.eagle.kv import KVCache
from specmeter.eagle.layer import DecoderLayer, RmsNorm, Step, group_mask
from specmeter.eagle.linear import Layout, Linear
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
        layout: Layout,
    ) -> None:
        size, vocab, dtype = config.hidden_size, config.vocab_size, layout.activations
        self.config = config
        self.capture = capture
        self.layout = layout
        self.dtype = dtype
        self.embedding = checkpoint.take("model.embed_tokens.weight", (vocab, size), layout.weights)
        self.layers, self.lm_head = _build(config, checkpoint, self.embedding, layout)
        self.norm = RmsNorm(checkpoint, "model.norm.weight", size, config.rms_norm_eps, dtype)
        self.rotary = RotaryTable(config, positions, dtype, layout.device, pairs=layout.pairs)

    @classmethod
    def from_dir(cls, model_dir: Path, *, capture: tuple[int, ...], positions: int, layout: Layout) -> Target:
        """Loads a Hugging Face style directory; SpecmeterError if it does not hold such a model."""
        config = LlamaConfig.from_dir(model_dir)
        checkpoint = Checkpoint(model_dir, layout.device)
        return cls(config, checkpoint, capture=capture, positions=positions, layout=layout)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache with room for ``capacity`` tokens."""
        c = self.config
        return KVCache(c.num_hidden_layers, c.num_key_value_heads, capacity, c.head_dim, self.dtype, self.layout.device)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, start: int, *, capture: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Runs ``tokens`` [rows] at ``positions`` [rows], writing cache slots start .. start+rows-1.

        ``mask`` is additive [rows, start + rows] and may be None for a single row. Returns the state after the last
        layer [rows, hidden] and, if ``capture``, the captured states side by side [rows, len(capture) * hidden].
        """
        rows = tokens.shape[0]
        step = Step(rows, self.rotary.at(positions), group_mask(mask, self.config))
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        states = {0: x}
        for index, (layer, slots) in enumerate(zip(self.layers, cache.window(start, rows), strict=True), 1):
            x = states[index] = layer.forward(x, step, slots)
        captured = torch.cat([states[k] for k in self.capture], dim=-1) if capture else None
        return x, captured

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [rows, vocab] from states after the last layer [rows, hidden]."""
        return self.lm_head(self.norm(hidden))


def _build(
    config: LlamaConfig, checkpoint: Checkpoint, embedding: Tensor, layout: Layout
) -> tuple[list[DecoderLayer], Linear]:
    """All layers and the output layer. Laying out weights is serial work per matrix, so two threads share it."""

    def layer(index: int) -> DecoderLayer:
        return DecoderLayer(config, checkpoint, f"model.layers.{index}", layout)

    def output() -> Linear:
        untied = "lm_head.weight" in checkpoint and not config.tie_word_embeddings
        shape = (config.vocab_size, config.hidden_size)
        return layout.linear(checkpoint.take("lm_head.weight", shape, layout.weights) if untied else embedding)

    # A thread's memory of OpenMP helpers ends with it, so none is left to compete with the engine's own.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        last = pool.submit(output)
        layers = list(pool.map(layer, range(config.num_hidden_layers)))
        return layers, last.result()
