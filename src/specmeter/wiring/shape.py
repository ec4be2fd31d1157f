"""What a config says a model is, under one set of names, whatever the model's family calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specmeter.checkpoint.numbers import short
from specmeter.errors import SpecmeterError

_TEXT_KEYS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that wiring depends on; None where the config does not say.

    ``config`` is the text model's config with the outer config's keys below it, ``outer`` the config as it stands.
    """

    architecture: str
    model_type: str
    layers: int | None
    hidden: int | None
    intermediate: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab: int | None
    draft_vocab: int | None
    dtype: str | None
    tied: bool
    max_positions: int | None
    config: Mapping[str, object]
    outer: Mapping[str, object]

    @property
    def text_architecture(self) -> str:
        """The architecture of the text model inside a multimodal one; otherwise the architecture."""
        for key in _TEXT_KEYS:
            inner = self.outer.get(key)
            if isinstance(inner, Mapping):
                found = _first_architecture(inner)
                if found:
                    return found
        return self.architecture


def read_shape(config: Mapping[str, object], role: str) -> Shape:
    """The shape of a config. Raises SpecmeterError when a number is not a number."""
    merged = dict(config)
    for key in _TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            merged.update({name: value for name, value in inner.items() if value is not None})
            break
    # A draft in the layout of the speculators library keeps its layer's config one level down.
    inner = config.get("transformer_layer_config")
    if isinstance(inner, Mapping):
        merged = {**inner, **{name: value for name, value in config.items() if value is not None}}
    hidden, heads = _integer(merged, "hidden_size", role), _integer(merged, "num_attention_heads", role)
    head_dim = _integer(merged, "head_dim", role)
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    dtype = merged.get("torch_dtype") or merged.get("dtype")
    return Shape(
        architecture=_first_architecture(config) or _first_architecture(merged) or "",
        model_type=str(merged.get("model_type") or ""),
        layers=_integer(merged, "num_hidden_layers", role),
        hidden=hidden,
        intermediate=_integer(merged, "intermediate_size", role),
        heads=heads,
        kv_heads=_integer(merged, "num_key_value_heads", role) or heads,
        head_dim=head_dim,
        vocab=_integer(merged, "vocab_size", role),
        draft_vocab=_integer(merged, "draft_vocab_size", role),
        dtype=dtype if isinstance(dtype, str) else None,
        tied=bool(merged.get("tie_word_embeddings", False)),
        max_positions=_integer(merged, "max_position_embeddings", role),
        config=merged,
        outer=config,
    )


def _first_architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _integer(config: Mapping[str, object], key: str, role: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecmeterError(
            f"the {role}'s config has {key} = {short(value)}, which is not a whole number",
            "It is a size of the model, in elements, layers or tokens.",
            f"Correct {key} in the config.json of --{role}.",
        )
    return value
