"""One decoder layer of a Llama-family model over a preallocated key-value cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specmeter.eagle.config import LlamaConfig
from specmeter.eagle.linear import Linear, make_linear
from specmeter.eagle.rope import rotate_
from specmeter.eagle.weights import Checkpoint


@dataclass(frozen=True)
class Step:
    """What all layers of one forward share.

    ``cos`` and ``sin`` are [rows, 1, head_dim]; ``mask`` is additive [rows, keys], or None where every row may see
    every key.
    """

    rows: int
    cos: Tensor
    sin: Tensor
    mask: Tensor | None


class Attention:
    """Grouped-query attention with q, k and v in one product. The input may be wider than the model (EAGLE-3)."""

    def __init__(
        self, config: LlamaConfig, checkpoint: Checkpoint, prefix: str, inputs: int, dtype: torch.dtype, packed: bool
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.group = self.heads // self.kv_heads
        self.eps = config.rms_norm_eps
        sizes = {
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "v": self.kv_heads * self.head_dim,
        }
        weight = torch.cat(
            [checkpoint.take(f"{prefix}.{n}_proj.weight", (size, inputs), dtype) for n, size in sizes.items()]
        )
        bias = None
        if f"{prefix}.q_proj.bias" in checkpoint:
            bias = torch.cat([checkpoint.take(f"{prefix}.{n}_proj.bias", (size,), dtype) for n, size in sizes.items()])
        self.qkv = make_linear(weight, bias, packed=packed)
        self.output: Linear = make_linear(
            checkpoint.take(f"{prefix}.o_proj.weight", (config.hidden_size, sizes["q"]), dtype), packed=packed
        )
        self.q_norm = self.k_norm = None
        if f"{prefix}.q_norm.weight" in checkpoint:
            self.q_norm = checkpoint.take(f"{prefix}.q_norm.weight", (self.head_dim,), dtype)
            self.k_norm = checkpoint.take(f"{prefix}.k_norm.weight", (self.head_dim,), dtype)

    def forward(self, x: Tensor, residual: Tensor, step: Step, fresh: Tensor, seen: Tensor) -> Tensor:
        """residual + attention of ``x`` [rows, inputs].

        ``fresh`` [2, kv_heads, rows, head_dim] is the part of the cache these rows write, ``seen``
        [2, kv_heads, keys, head_dim] the part they attend to, which ends with theirs.
        """
        qkv = self.qkv(x).view(step.rows, self.heads + 2 * self.kv_heads, self.head_dim)
        rotated = qkv.narrow(1, 0, self.heads + self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            self._normalize_heads(qkv)
        rotate_(rotated, step.cos, step.sin, self.head_dim // 2)
        new = qkv.narrow(1, self.heads, 2 * self.kv_heads)
        fresh.copy_(new.view(step.rows, 2, self.kv_heads, self.head_dim).permute(1, 2, 0, 3))
        query = qkv.narrow(1, 0, self.heads).view(step.rows, self.kv_heads, self.group, self.head_dim)
        return self.output.plus(self._attend(query, step, seen), residual)

    def _attend(self, query: Tensor, step: Step, seen: Tensor) -> Tensor:
        keys, values = seen.unsqueeze(2).unbind(0)
        if step.rows == 1:
            # The heads of a group are rows of one query: torch's kernel is three times as fast on several rows.
            mixed = F.scaled_dot_product_attention(query.permute(1, 0, 2, 3), keys, values, step.mask)
            return mixed.reshape(1, -1)
        shape = (self.kv_heads, self.group, seen.shape[2], self.head_dim)
        mixed = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), keys.expand(shape), values.expand(shape), step.mask
        )
        return mixed.permute(2, 0, 1, 3).reshape(step.rows, -1)

    def _normalize_heads(self, qkv: Tensor) -> None:
        q = qkv.narrow(1, 0, self.heads)
        k = qkv.narrow(1, self.heads, self.kv_heads)
        q.copy_(F.rms_norm(q, (self.head_dim,), self.q_norm, self.eps))
        k.copy_(F.rms_norm(k, (self.head_dim,), self.k_norm, self.eps))


class Mlp:
    """down(silu(gate(x)) * up(x)) + residual."""

    def __init__(
        self, config: LlamaConfig, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, packed: bool
    ) -> None:
        wide, narrow = (config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)
        self.gate = make_linear(checkpoint.take(f"{prefix}.gate_proj.weight", wide, dtype), packed=packed)
        self.up = make_linear(checkpoint.take(f"{prefix}.up_proj.weight", wide, dtype), packed=packed)
        self.down = make_linear(checkpoint.take(f"{prefix}.down_proj.weight", narrow, dtype), packed=packed)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        return self.down.plus(self.up.times(x, self.gate.silu(x)), residual)


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, checkpoint: Checkpoint, name: str, size: int, eps: float, dtype: torch.dtype) -> None:
        self.weight = checkpoint.take(name, (size,), dtype)
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class DecoderLayer:
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(
        self, config: LlamaConfig, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, packed: bool
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RmsNorm(checkpoint, f"{prefix}.input_layernorm.weight", size, eps, dtype)
        self.attention = Attention(config, checkpoint, f"{prefix}.self_attn", size, dtype, packed)
        self.mlp_norm = RmsNorm(checkpoint, f"{prefix}.post_attention_layernorm.weight", size, eps, dtype)
        self.mlp = Mlp(config, checkpoint, f"{prefix}.mlp", dtype, packed)

    def forward(self, x: Tensor, step: Step, fresh: Tensor, seen: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; writes this layer's keys and values of these rows."""
        x = self.attention.forward(self.input_norm(x), x, step, fresh, seen)
        return self.mlp.forward(self.mlp_norm(x), x)
