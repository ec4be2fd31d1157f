"""Configurations of the target model and of the draft head, read from a Hugging Face style ``config.json``.

Tested with real weights: Llama layout (SmolLM2-135M). Tested with small random weights only: Qwen2 (biases on q, k, v)
and Qwen3 (RMS norm on each q and k head).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.checkpoint.numbers import MOST, is_number, refuse_layers, short
from specmeter.checkpoint.safetensors_header import load_json, open_regular
from specmeter.errors import Exit, SpecmeterError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of ``model_type`` that the engine runs. SmolLM2 is ``llama``."""

CAPTURE_KEY = "specmeter_capture"
"""Key of a head's config: the list of k, each meaning the target state H[k] that feeds the head."""


MAX_CONFIG_BYTES = 64 << 20


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies (``rope_type`` ``llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama-family target. Sizes are in elements, ``max_position_embeddings`` in tokens."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None

    @classmethod
    def from_dir(cls, model_dir: Path) -> LlamaConfig:
        """Reads ``model_dir/config.json``; raises SpecmeterError if it is missing or of an unknown family."""
        raw = read_config(model_dir)
        family = str(raw.get("model_type", "llama"))
        if family not in FAMILIES:
            raise SpecmeterError(
                f"The model in {model_dir} is of type {family!r}.",
                "The embedded engine runs Llama-family models only: " + ", ".join(FAMILIES) + ".",
                "Name a directory of such a model, or leave --model out to use SmolLM2-135M-Instruct.",
            )
        return cls(family=family, **_shape(raw, model_dir))


@dataclass(frozen=True)
class DraftConfig:
    """Shape of an EAGLE-3 head.

    ``capture`` lists the target states that feed it: k means H[k], where H[0] is the embedding output and H[k] the
    output of decoder layer k-1 before the final norm. ``layer`` is the shape of its one decoder layer.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    capture: tuple[int, ...]

    @classmethod
    def from_dir(cls, draft_dir: Path) -> DraftConfig:
        """Reads ``draft_dir/config.json``; raises SpecmeterError if it is missing or does not state the capture ids."""
        raw = read_config(draft_dir)
        layer = LlamaConfig(family="llama", **_shape(raw, draft_dir))
        draft_vocab = _integer(raw, "draft_vocab_size", draft_dir, default=layer.vocab_size)
        return cls(layer=layer, draft_vocab_size=draft_vocab, capture=_capture(raw, draft_dir))


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a model folder; SpecmeterError if there is none or it is no JSON object."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        why = "It has no config.json." if folder.is_dir() else "It does not exist or is not a directory."
        raise SpecmeterError(f"{folder} is not a model directory.", why, "Name a directory with config.json.")
    with open_regular(path) as stream:
        raw = load_json(path, stream.read(MAX_CONFIG_BYTES), strict=False)
    if not isinstance(raw, dict):
        raise SpecmeterError(f"Cannot use {path}.", "It is not a JSON object.", "Repair or replace the file.")
    return raw


def _shape(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    hidden = _integer(raw, "hidden_size", folder)
    heads = _integer(raw, "num_attention_heads", folder)
    kv_heads = _integer(raw, "num_key_value_heads", folder, default=heads)
    if heads % kv_heads:
        raise _unusable(folder, f"{heads} attention heads are not a multiple of {kv_heads} key-value heads.")
    if str(raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise _unusable(folder, f"hidden_act is {raw['hidden_act']!r}; only silu is known.")
    head_dim = _integer(raw, "head_dim", folder, default=hidden // heads)
    if head_dim % 2:
        raise _unusable(folder, f"Its head_dim {head_dim} is odd; rotary embedding pairs dimensions.")
    layers = _integer(raw, "num_hidden_layers", folder)
    refuse_layers(layers, "model", folder)
    rope = _rope(raw, folder)
    theta = raw if raw.get("rope_theta") is not None else rope
    return {
        "hidden_size": hidden,
        "intermediate_size": _integer(raw, "intermediate_size", folder),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _integer(raw, "vocab_size", folder),
        "rms_norm_eps": _number(raw, "rms_norm_eps", folder, default=1e-6, zero=True),
        "rope_theta": _number(theta, "rope_theta", folder, default=10000.0),
        "max_position_embeddings": _integer(raw, "max_position_embeddings", folder, default=2048),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "rope_scaling": _rope_scaling(rope, folder),
    }


def _rope_scaling(rope: Mapping[str, Any], folder: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise _unusable(folder, f"Its rotary scaling is {kind!r}; only 'default' and 'llama3' are known.")
    low, high = (_number(rope, name, folder) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise _unusable(folder, f"Its rotary scaling has low_freq_factor {low:g} and high_freq_factor {high:g}.")
    return RopeScaling(
        factor=_number(rope, "factor", folder),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_integer(rope, "original_max_position_embeddings", folder),
    )


def _rope(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The table of rotary parameters, in the newer or the older spelling; empty when there is none."""
    for key in ("rope_parameters", "rope_scaling"):
        table = raw.get(key)
        if table is not None and not isinstance(table, dict):
            raise _unusable(folder, f"{key} is {short(table)} in its config.json, not an object.")
        if table:
            return table
    return {}


def _capture(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    nested = raw.get("eagle_config")
    ids = (nested if isinstance(nested, dict) else {}).get(CAPTURE_KEY, raw.get(CAPTURE_KEY))
    if isinstance(ids, list) and ids and all(type(k) is int for k in ids):
        if len(set(ids)) != len(ids):
            raise _unusable(folder, f"Its {CAPTURE_KEY} {short(ids)} names a state twice.")
        return tuple(ids)
    if ids is not None:
        raise _unusable(folder, f"Its {CAPTURE_KEY} is {short(ids)}, not a list of whole numbers.")
    raise SpecmeterError(
        f"The head in {folder} does not say which target states feed it.",
        f"Its config.json has no {CAPTURE_KEY!r} list; the layer ids that other engines read mean different states.",
        f'Add "{CAPTURE_KEY}": [k, ...] where k is the output of decoder layer k-1 and 0 the embedding output.',
    )


def _integer(raw: Mapping[str, Any], key: str, folder: Path, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int or not 0 < value <= MOST:
        raise _unusable(folder, f"config.json has no positive {key}" + (f": {short(value)}." if value else "."))
    return value


def _number(
    raw: Mapping[str, Any], key: str, folder: Path, default: float | None = None, *, zero: bool = False
) -> float:
    """A finite number above 0, or from 0 where ``zero`` is set."""
    value = raw.get(key)
    if value is None:
        value = default
    if not is_number(value) or value < 0 or (value == 0 and not zero):
        raise _unusable(folder, f"{key} is {short(value)} in its config.json; it must be a number above 0.")
    return float(value)


def _unusable(folder: Path, why: str) -> SpecmeterError:
    return SpecmeterError(
        f"The model in {folder} cannot be used.",
        why,
        "Correct its config.json, or name another directory.",
        exit=Exit.USAGE,
    )
