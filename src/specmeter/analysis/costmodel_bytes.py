"""What a verify forward reads from memory, by part: weights, experts, and the keys and values of the context.

At small batches a forward is bound by memory, so its time should go as these bytes; where a wider one takes longer than
its bytes say, something else costs (launches, another kernel, arithmetic, collectives). Counted for Llama-like layers:
query, key, value and output projections, gated MLPs of three matrices, one lm_head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.analysis.costmodel_checks import whole
from specmeter.analysis.moe import Experts, distinct_experts
from specmeter.errors import SpecmeterError
from specmeter.trace.strict_json import read_json

_WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0}
_NUMBERS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size", "intermediate_size", "first_k_dense_replace",
    "vocab_size", "n_shared_experts", "num_experts_per_tok",
)  # fmt: skip
_MOST = 10**9
_MOST_BYTES = 16 << 20
_STEP = "Give the config.json of the target model, or leave --shape out."


@dataclass(frozen=True)
class Shape:
    """Parameters that a forward always reads (``dense``) and those of one ``expert``, both over all layers.

    ``kv`` counts numbers of keys and values a token of context, ``width_bytes`` bytes a number; experts None: dense.
    """

    dense: float
    expert: float
    kv: float
    width_bytes: float
    experts: Experts | None


@dataclass(frozen=True)
class Read:
    """Bytes one forward reads."""

    weights: float
    experts: float
    kv: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.experts + self.kv


def forward_bytes(shape: Shape, tokens: int, context: float, batch: float = 1.0) -> Read:
    """What a forward of ``tokens`` tokens a sequence reads, with ``context`` tokens of cache a sequence."""
    experts = 0.0
    if shape.experts is not None:
        experts = shape.expert * distinct_experts(shape.experts, tokens * batch)
    one = shape.width_bytes
    return Read(shape.dense * one, experts * one, shape.kv * context * batch * one)


def read_shape(path: Path) -> Shape:
    """The shape in a ``config.json`` (or in a folder that holds one).

    Raises SpecmeterError for an unreadable file and for attention that is not counted here (latent attention).
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file, _MOST_BYTES)
    except OSError as error:
        raise SpecmeterError(f"{file} cannot be read.", error.strerror or str(error)) from None
    except ValueError as error:
        raise SpecmeterError(f"{file} is not valid JSON.", str(error), _STEP) from None
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    config = {**config, **(text if isinstance(text, dict) else {})}
    if config.get("kv_lora_rank") is not None:
        raise SpecmeterError(f"{file}: latent attention (MLA) is not counted.", next_step="Leave --shape out.")
    for key in _NUMBERS:
        if config.get(key) is not None:
            whole(config[key], key, str(file), 0, _MOST, _STEP)
    try:
        return _shape(config)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        why = f"Missing or of another form: {error}."
        raise SpecmeterError(f"{file} lacks what a shape needs.", why, _STEP) from None


def _shape(config: Mapping[str, Any]) -> Shape:
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    total = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    first = (config.get("first_k_dense_replace") or 0) if total else layers
    dense = layers * attention + first * 3 * hidden * config["intermediate_size"] + config["vocab_size"] * hidden
    if total:
        dense += (layers - first) * (hidden * total + (config.get("n_shared_experts") or 0) * 3 * hidden * inner)
    return Shape(
        dense=float(dense),
        expert=float((layers - first) * 3 * hidden * inner) if total else 0.0,
        kv=float(2 * layers * kv_heads * size),
        width_bytes=_WIDTHS.get(str(config.get("torch_dtype") or config.get("dtype")), 2.0),
        experts=Experts(int(total), int(config["num_experts_per_tok"])) if total else None,
    )
