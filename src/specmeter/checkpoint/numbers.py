"""Numbers of a config.json: what counts as one, and sizes that no model can have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from specmeter.errors import SpecmeterError

if TYPE_CHECKING:  # a check runs on hosts with a Python of 3.9 too
    from typing import TypeGuard

# No model has nearly as many; a config that claims more must not make anybody build a list of them.
MOST_LAYERS = 10_000
# Far above every size of a published model, in elements or tokens.
MOST = 1 << 40


def refuse_layers(layers: int | None, role: str, folder: object) -> None:
    """SpecmeterError when a config claims more than ``MOST_LAYERS`` layers."""
    if layers is not None and layers > MOST_LAYERS:
        raise SpecmeterError(
            f"the {role}'s config in {folder} has num_hidden_layers = {short(layers)}",
            f"No model has more than {MOST_LAYERS:,} layers.",
            "Correct num_hidden_layers in its config.json.",
        )


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value from JSON is a finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def short(value: object) -> str:
    """A value of a config as it is shown in a message, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
