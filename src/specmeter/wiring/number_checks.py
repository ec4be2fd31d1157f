"""Checks of a config's numbers: sizes that no model can have, and values that are no numbers at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specmeter.checkpoint.numbers import MOST, is_number, short
from specmeter.wiring.findings import Finding, error

HEAD_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
# A target's other sizes are the engine's affair: families without attention or MLP of the usual kind write 0.
TARGET_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def check_numbers(head: Mapping[str, object], target: Mapping[str, object]) -> list[Finding]:
    """Findings about the numbers of the head's config and the target's; absent and null values are no fault."""
    return [*_sizes(head, "head", HEAD_SIZES), *_norm(head), *_rope(head), *_sizes(target, "target", TARGET_SIZES)]


def _sizes(config: Mapping[str, object], whose: str, keys: Sequence[str]) -> Iterator[Finding]:
    for key in keys:
        value = config.get(key)
        if value is None or (type(value) is int and 0 < value <= MOST):
            continue
        yield error(
            "config-number",
            f"the {whose}'s {key} is {short(value)}",
            f"It must be a whole number from 1 to {MOST:,}: the engine fails at start, or computes nothing.",
            f"Correct {key} in the {whose}'s config.json.",
        )


def _norm(config: Mapping[str, object]) -> Iterator[Finding]:
    value = config.get("rms_norm_eps")
    # 0 is what some configs say; a norm of more than 1 would drown every state.
    if value is not None and not (is_number(value) and 0 <= value < 1):
        yield error(
            "config-number",
            f"the head's rms_norm_eps is {short(value)}",
            "It is added below a square root: it must be a number from 0 up to 1, usually 1e-5 or 1e-6.",
            "Copy rms_norm_eps from the head's training config.",
        )


def _rope(config: Mapping[str, object]) -> Iterator[Finding]:
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key)
        if table is not None and not isinstance(table, Mapping):
            yield error(
                "rope",
                f"the head's {key} is {short(table)}, not an object",
                "Engines read its type and factor by name: they fail at start.",
                f"Correct {key} in the head's config.json, or remove it.",
            )
    parameters = config.get("rope_parameters")
    theta = config.get("rope_theta", parameters.get("rope_theta") if isinstance(parameters, Mapping) else None)
    if theta is not None and not (is_number(theta) and theta > 0):
        yield error(
            "rope",
            f"the head's rope_theta is {short(theta)}",
            "It is the base of the rotary frequencies: it must be a number above 0.",
            "Copy rope_theta from the head's training config.",
        )
