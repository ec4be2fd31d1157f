"""The weights of target and draft as flat groups of tensors, for the passes that run inside CUDA graphs.

Nothing is copied: these are the tensors that ``Target`` and ``Draft`` hold in plain layout, and views of their caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmeter.eagle.config import LlamaConfig
from specmeter.eagle.draft import Draft
from specmeter.eagle.kv import KVCache
from specmeter.eagle.layer import Attention, Mlp
from specmeter.eagle.linear import Linear, PlainLinear
from specmeter.eagle.rope import RotaryTable
from specmeter.eagle.target import Target


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: matrices [out, in], norms [hidden] in float32, its cache, and the rotary tables.

    ``hidden_norm`` is there in a draft layer, whose input is two normed states side by side. ``keys`` and ``values``
    are [kv_heads, capacity, head_dim]; ``cos`` and ``sin`` [positions, head_dim] in float32, the sign in ``sin``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    input_norm: Tensor
    hidden_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class OutputWeights:
    """The final norm [hidden] and the output layer [vocab, hidden]; ``ids`` [vocab] maps to target ids, or None."""

    norm: Tensor
    eps: float
    lm_head: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class TargetWeights:
    """The whole target. ``capture`` as in ``Target``."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    output: OutputWeights
    capture: tuple[int, ...]


@dataclass(frozen=True)
class DraftWeights:
    """The whole draft head."""

    embedding: Tensor
    fc: Tensor
    layer: LayerWeights
    output: OutputWeights


def target_weights(target: Target, cache: KVCache) -> TargetWeights:
    """The weights of ``target`` over ``cache``, which must have been made by it."""
    config = target.config
    tables = _tables(config, target.rotary)
    layers = []
    for index, layer in enumerate(target.layers):
        norms = (layer.input_norm.weight, None, layer.mlp_norm.weight)
        layers.append(_layer(config, norms, layer.attention, layer.mlp, cache.data[index], tables))
    output = OutputWeights(target.norm.weight, config.rms_norm_eps, _matrix(target.lm_head), None)
    return TargetWeights(target.embedding, tuple(layers), output, target.capture)


def draft_weights(draft: Draft, cache: KVCache) -> DraftWeights:
    """The weights of ``draft`` over ``cache``, which must have been made by it."""
    config = draft.config.layer
    norms = (draft.input_norm.weight, draft.hidden_norm.weight, draft.mlp_norm.weight)
    layer = _layer(config, norms, draft.attention, draft.mlp, cache.data[0], _tables(config, draft.rotary))
    output = OutputWeights(draft.norm.weight, config.rms_norm_eps, _matrix(draft.lm_head), draft.target_ids)
    return DraftWeights(draft.embedding, _matrix(draft.fc), layer, output)


def _layer(
    config: LlamaConfig,
    norms: tuple[Tensor, Tensor | None, Tensor],
    attention: Attention,
    mlp: Mlp,
    cache: Tensor,
    tables: tuple[Tensor, Tensor],
) -> LayerWeights:
    qkv = attention.qkv
    return LayerWeights(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        input_norm=norms[0],
        hidden_norm=norms[1],
        qkv=_matrix(qkv),
        qkv_bias=qkv.bias if isinstance(qkv, PlainLinear) else None,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        output=_matrix(attention.output),
        mlp_norm=norms[2],
        gate_up=_matrix(mlp.gate_up),
        down=_matrix(mlp.down),
        keys=cache[0],
        values=cache[1],
        cos=tables[0],
        sin=tables[1],
    )


def _tables(config: LlamaConfig, like: RotaryTable) -> tuple[Tensor, Tensor]:
    # In float32, whatever the model's dtype: inside a kernel it costs nothing to rotate in full precision.
    table = RotaryTable(config, like.cos.shape[0], torch.float32, like.cos.device)
    return table.cos[:, 0].contiguous(), table.sin[:, 0].contiguous()


def _matrix(linear: Linear) -> Tensor:
    assert isinstance(linear, PlainLinear), "the passes read plain weights"
    return linear.weight
