"""Which states a head was trained on, as far as its config tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specmeter.wiring.feed import CAPTURE, NESTED, TOP, default_states, key_text, lookup

# Target classes for which SGLang changed the meaning of ids from the layer's output to its input in 0.5.13.
CHANGED_MEANING = ("DeepseekV2", "DeepseekV3", "DeepseekV32", "KimiK25", "GlmMoeDsa", "Glm4MoeLite")


@dataclass(frozen=True)
class Trained:
    """States that a head was trained on. ``certain`` is False when convention had to fill in; ``why`` says how."""

    states: tuple[int, ...] | None
    certain: bool
    why: str


def trained_states(
    config: Mapping[str, object],
    outer: Mapping[str, object],
    layers: int,
    architecture: str,
    told: tuple[int, ...] | None,
) -> Trained:
    """The states a head was trained on: told by the user, stated in the config, or concluded from whose key is used."""
    if told is not None:
        return Trained(told, True, "told with --trained")
    for key in CAPTURE:
        stated = _ids(lookup(config, key))
        if stated:
            return Trained(stated, True, f"the head's config states them ({key_text(key)})")
    top, nested = _ids(lookup(config, TOP)), _ids(lookup(config, NESTED))
    if top and "speculators_model_type" in outer:
        return Trained(top, True, "a head of the speculators library: ids are H[k] there")
    if top and nested:
        if tuple(k + 1 for k in nested) == top or (top == nested and architecture.startswith(CHANGED_MEANING)):
            return Trained(top, False, "both keys are set and agree")
        return Trained(None, False, f"two keys are set and disagree: {list(top)} on top, {list(nested)} nested")
    if top:
        return Trained(top, False, f"{key_text(TOP)} is vLLM's and speculators' key, where id k means H[k]")
    if nested:
        return _nested(nested, layers, architecture)
    return Trained(default_states(layers), False, "nothing is stated; trainers' default")


def _nested(nested: tuple[int, ...], layers: int, architecture: str) -> Trained:
    if architecture.startswith(CHANGED_MEANING):
        why = "nested ids for this target class mean outputs up to SGLang 0.5.12 and inputs from 0.5.13: not decidable"
        return Trained(None, False, why)
    if architecture == "GptOssForCausalLM" and max(nested) == layers:
        return Trained(nested, False, "nested ids that reach the last layer's output are H[k] for gpt-oss in SGLang")
    outputs = tuple(k + 1 for k in nested)
    return Trained(outputs, False, f"{key_text(NESTED)} is SGLang's and SpecForge's key, where id j means H[j+1]")


def _ids(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    return None
