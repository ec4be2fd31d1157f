"""A batched Llama target for training: many sequences at once, in plain PyTorch.

The serving engine runs one sequence at a time; training wants thousands. Weights come from the same Hugging Face
style directory. H[0] is the embedding output and H[k] the output of decoder layer k-1, before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmeter.eagle.config import LlamaConfig
from specmeter.errors import SpecmeterError


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer, with q, k, v and gate, up each joined into one matrix."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class BatchedTarget:
    """A Llama model whose forward takes a batch of right-padded sequences.

    ``embedding`` is [vocab, hidden]; ``lm_head`` the same tensor where the model ties them. All weights are frozen.
    """

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, lm_head: Tensor, norm: Tensor, layers: list[LayerWeights]
    ):
        self.config = config
        self.embedding = embedding
        self.lm_head = lm_head
        self.norm = norm
        self.layers = layers
        self.cos, self.sin = rope_tables(config.head_dim, config.rope_theta, 4096, embedding.device, embedding.dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @classmethod
    def from_dir(cls, model_dir: Path, device: torch.device, dtype: torch.dtype) -> BatchedTarget:
        """Loads a plain Llama directory (no biases, no q/k norms); raises SpecmeterError for any other."""
        from safetensors.torch import load_file

        config = LlamaConfig.from_dir(model_dir)
        if config.family != "llama" or config.rope_scaling is not None:
            raise SpecmeterError(
                f"Cannot train a head for the model in {model_dir}.",
                f"Training knows plain Llama layers only; this is {config.family!r}, or scales its rotary embedding.",
                "Leave --model out to train for SmolLM2-135M-Instruct.",
            )
        raw: dict[str, Tensor] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            raw.update({name: t.to(device, dtype) for name, t in load_file(path).items()})
        embedding = raw["model.embed_tokens.weight"]
        lm_head = raw.get("lm_head.weight", embedding)
        layers = [_layer(raw, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        return cls(config, embedding, lm_head, raw["model.norm.weight"], layers)

    @classmethod
    def random(cls, config: LlamaConfig, device: torch.device, dtype: torch.dtype, seed: int) -> BatchedTarget:
        """A model of random weights: for tests and for rehearsals where no weights are at hand."""
        generator = torch.Generator().manual_seed(seed)
        d, inter, hd = config.hidden_size, config.intermediate_size, config.head_dim
        rows_qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * hd

        def matrix(rows: int, columns: int) -> Tensor:
            scale = columns**-0.5
            return torch.randn(rows, columns, generator=generator).mul_(scale).to(device, dtype)

        ones = torch.ones(d, device=device, dtype=dtype)
        heads = config.num_attention_heads * hd
        layers = [
            LayerWeights(ones, matrix(rows_qkv, d), matrix(d, heads), ones, matrix(2 * inter, d), matrix(d, inter))
            for _ in range(config.num_hidden_layers)
        ]
        embedding = (torch.randn(config.vocab_size, d, generator=generator)).to(device, dtype)
        lm_head = embedding if config.tie_word_embeddings else matrix(config.vocab_size, d) * 4
        return cls(config, embedding, lm_head, ones, layers)

    @torch.no_grad()
    def states(self, ids: Tensor, capture: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Teacher-forced forward of right-padded ``ids`` [B, S].

        Returns the captured states joined in the order of ``capture`` [B, S, hidden * len(capture)] and the final
        normed states [B, S, hidden], which ``logits`` takes. Rows at padding are meaningless but finite.
        """
        hidden = F.embedding(ids, self.embedding)
        kept = {0: hidden} if 0 in capture else {}
        rope = (self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        for index, layer in enumerate(self.layers):
            q, k, v = self.project(layer, hidden, rope)
            attended = causal_attention(q, k, v)
            hidden = self.finish(layer, hidden, attended)
            if index + 1 in capture:
                kept[index + 1] = hidden
        final = self.rms(hidden, self.norm)
        return torch.cat([kept[k] for k in capture], dim=-1), final

    def logits(self, final: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits [.., vocab] of final normed states; ``rows`` [n] restricts them to n vocabulary entries."""
        weight = self.lm_head if rows is None else self.lm_head[rows]
        return F.linear(final, weight)

    def rms(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension."""
        return rms_norm(hidden, weight, self.config.rms_norm_eps)

    def project(
        self, layer: LayerWeights, hidden: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [B, heads, S, d], rotated k and v [B, kv heads, S, d] of one layer."""
        config = self.config
        batch, length, _ = hidden.shape
        joined = F.linear(self.rms(hidden, layer.input_norm), layer.qkv)
        joined = joined.view(batch, length, -1, config.head_dim).transpose(1, 2)
        n, g = config.num_attention_heads, config.num_key_value_heads
        rotated = rotate(joined[:, : n + g], *rope)
        return rotated[:, :n], rotated[:, n:], joined[:, n + g :]

    def finish(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input ``hidden`` [B, S, hidden] and attention [B, heads, S, d]."""
        hidden = hidden + F.linear(attended.transpose(1, 2).reshape(*hidden.shape[:2], -1), layer.out)
        gate, up = F.linear(self.rms(hidden, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, layer.down)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension."""
    normed: Tensor = F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)
    return normed


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with grouped key-value heads: q [B, heads, S, d], k and v [B, kv heads, S, d]."""
    groups = q.shape[1] // k.shape[1]
    # Expanded keys keep every fused kernel usable; the grouped option falls back to a slow one on some builds.
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rope_tables(
    head_dim: int, theta: float, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of rotary embedding, halves repeated as Hugging Face lays them out."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse).repeat(1, 2)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [.., d] by cos and sin that broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _layer(raw: dict[str, Any], prefix: str) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LayerWeights(
        input_norm=raw[prefix + "input_layernorm.weight"],
        qkv=torch.cat([raw[f"{attention}{name}_proj.weight"] for name in "qkv"]),
        out=raw[attention + "o_proj.weight"],
        post_norm=raw[prefix + "post_attention_layernorm.weight"],
        gate_up=torch.cat([raw[mlp + "gate_proj.weight"], raw[mlp + "up_proj.weight"]]),
        down=raw[mlp + "down_proj.weight"],
    )
