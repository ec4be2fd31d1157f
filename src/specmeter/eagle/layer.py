"""One decoder layer of a Llama-family model over a preallocated key-value cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specmeter.eagle.config import LlamaConfig
from specmeter.eagle.kv import Slots
from specmeter.eagle.linear import Layout, Linear
from specmeter.eagle.rope import Rotation, pair_up
from specmeter.eagle.weights import Checkpoint


@dataclass(frozen=True)
class Step:
    """What all layers of one forward share.

    ``mask`` is additive [rows * group, keys] (see ``group_mask``), or None
    where every row may see every key.
    """

    rows: int
    rotation: Rotation
    mask: Tensor | None


def group_mask(mask: Tensor | None, config: LlamaConfig) -> Tensor | None:
    """The mask [rows, keys] for queries whose heads of a group are rows: [rows * group, keys]."""
    group = config.num_attention_heads // config.num_key_value_heads
    return None if mask is None else mask.repeat_interleave(group, 0)


class Attention:
    """Grouped-query attention with q, k and v in one product. The input may be wider than the model (EAGLE-3)."""

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, prefix: str, inputs: int, layout: Layout) -> None:
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.group = self.heads // self.kv_heads
        self.width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.eps = config.rms_norm_eps
        sizes = {
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "v": self.kv_heads * self.head_dim,
        }

        def part(name: str, shape: tuple[int, ...], dtype: torch.dtype, turned: bool) -> Tensor:
            found = checkpoint.take(f"{prefix}.{name}", shape, dtype)
            return pair_up(found, self.head_dim) if turned and layout.pairs else found

        weight = torch.cat(
            [part(f"{n}_proj.weight", (size, inputs), layout.weights, n != "v") for n, size in sizes.items()]
        )
        bias = None
        if f"{prefix}.q_proj.bias" in checkpoint:
            bias = torch.cat(
                [part(f"{n}_proj.bias", (size,), layout.activations, n != "v") for n, size in sizes.items()]
            )
        self.qkv = layout.linear(weight, bias)
        self.output: Linear = layout.linear(
            checkpoint.take(f"{prefix}.o_proj.weight", (config.hidden_size, sizes["q"]), layout.weights)
        )
        self.q_norm = self.k_norm = None
        if f"{prefix}.q_norm.weight" in checkpoint:
            self.q_norm = part("q_norm.weight", (self.head_dim,), layout.activations, True)
            self.k_norm = part("k_norm.weight", (self.head_dim,), layout.activations, True)

    def forward(self, x: Tensor, residual: Tensor, step: Step, slots: Slots) -> Tensor:
        """residual + attention of ``x`` [rows, inputs], which writes and reads ``slots``."""
        rows, dim, group, kv_heads = step.rows, self.head_dim, self.group, self.kv_heads
        qkv = self.qkv(x)
        if self.q_norm is not None:
            self._normalize_heads(qkv.as_strided((rows, self.heads + kv_heads, dim), (self.width, dim, 1)))
        step.rotation.turn_(qkv, self.heads + kv_heads)
        # Views of q, k and v inside the one product; a chain of view calls would cost more than the copy.
        new = qkv.as_strided((2, kv_heads, rows, dim), (kv_heads * dim, dim, self.width, 1), self.heads * dim)
        slots.fresh.copy_(new)
        # The heads of a group share their keys, so they are rows of one query: [kv_heads, 1, rows * group, head_dim].
        query = qkv.as_strided((kv_heads, rows, group, dim), (group * dim, self.width, dim, 1))
        mixed = F.scaled_dot_product_attention(
            query.reshape(kv_heads, 1, rows * group, dim), slots.keys, slots.values, step.mask
        )
        if rows > 1:
            mixed = mixed.view(kv_heads, rows, group, dim).transpose(0, 1)
        return self.output.plus(mixed.reshape(rows, self.heads * dim), residual)

    def _normalize_heads(self, rotated: Tensor) -> None:
        q, k = rotated.split_with_sizes([self.heads, self.kv_heads], 1)
        q.copy_(F.rms_norm(q, (self.head_dim,), self.q_norm, self.eps))
        k.copy_(F.rms_norm(k, (self.head_dim,), self.k_norm, self.eps))


class Mlp:
    """down(silu(gate(x)) * up(x)) + residual. Gate and up are one product: a call costs more than the activation."""

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, prefix: str, layout: Layout) -> None:
        wide, narrow = (config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)
        self.sizes = [config.intermediate_size] * 2
        both = [checkpoint.take(f"{prefix}.{name}_proj.weight", wide, layout.weights) for name in ("gate", "up")]
        self.gate_up = layout.linear(torch.cat(both))
        self.down = layout.linear(checkpoint.take(f"{prefix}.down_proj.weight", narrow, layout.weights))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        both = self.gate_up(x)
        gate, up = both.split_with_sizes(self.sizes, 1)
        return self.down.plus(F.silu(gate).mul_(up), residual)


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    That is (x * weight * sqrt(size)) / sqrt(|x|^2 + size * eps), four small kernels of which the second is a hypot. Of
    the ways to write it this costs least here: torch's own rms_norm is six on the CPU, and layer_norm over [x, -x],
    which is the same function, starts its threads for two rows or more.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, size: int, eps: float, dtype: torch.dtype) -> None:
        self.weight = checkpoint.take(name, (size,), torch.float32)
        self.scaled = (self.weight.double() * math.sqrt(size)).float()
        self.least = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=self.weight.device)
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        return (x * self.scaled).div_(torch.hypot(length, self.least)).to(self.dtype)


class DecoderLayer:
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, prefix: str, layout: Layout) -> None:
        size, eps, dtype = config.hidden_size, config.rms_norm_eps, layout.activations
        self.input_norm = RmsNorm(checkpoint, f"{prefix}.input_layernorm.weight", size, eps, dtype)
        self.attention = Attention(config, checkpoint, f"{prefix}.self_attn", size, layout)
        self.mlp_norm = RmsNorm(checkpoint, f"{prefix}.post_attention_layernorm.weight", size, eps, dtype)
        self.mlp = Mlp(config, checkpoint, f"{prefix}.mlp", layout)

    def forward(self, x: Tensor, step: Step, slots: Slots) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; writes this layer's keys and values of these rows."""
        x = self.attention.forward(self.input_norm(x), x, step, slots)
        return self.mlp.forward(self.mlp_norm(x), x)
