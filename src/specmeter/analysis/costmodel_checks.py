"""Checks of what users write into files of figures and model shapes: each names the place and what would do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specmeter.errors import SpecmeterError

FORM = "See docs/explain.md for the form."
# Milliseconds, tokens and rates of any server lie between these; their products and ratios stay finite.
LEAST, MOST = 1e-9, 1e12


def number(table: Mapping[str, Any], key: str, where: str, most: float = MOST, zero: bool = False) -> float | None:
    """The number above 0 (with ``zero`` at least 0) and up to ``most`` of a key, None where it is not there.

    Raises SpecmeterError for anything else, truth values, NaN and infinity included.
    """
    value = table.get(key)
    return None if value is None else checked(value, key, where, most, zero)


def checked(value: Any, key: str, where: str, most: float = MOST, zero: bool = False) -> float:
    """As ``number``, of a value that is there."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not plain or not (LEAST <= value <= most or (zero and value == 0)):
        least = "from 0" if zero else "above 0"
        limit = f", at most {most:g}" if most != MOST else ""
        raise SpecmeterError(
            f"{where}: {key} is {shown(value)}; it must be a number {least}{limit}.", next_step=f"Mend it. {FORM}"
        )
    return float(value)


def whole(value: Any, key: str, where: str, least: int, most: int, next_step: str = f"Mend it. {FORM}") -> int:
    """A whole number from ``least`` to ``most``; raises SpecmeterError for anything else, truth values included."""
    if type(value) is not int or not least <= value <= most:
        raise SpecmeterError(
            f"{where}: {key} is {shown(value)}; it must be a whole number from {least} to {most}.",
            next_step=next_step,
        )
    return int(value)


def word(table: Mapping[str, Any], key: str, otherwise: str, where: str) -> str:
    """The text of a key, ``otherwise`` where it is not there; raises SpecmeterError for what is no text."""
    value = table.get(key, otherwise)
    if not isinstance(value, str):
        raise SpecmeterError(f"{where}: {key} is {shown(value)}; it must be a text.", next_step=f"Mend it. {FORM}")
    return value


def shown(value: Any) -> str:
    """A value as a message shows it: short, and never a number of thousands of digits (Python refuses to print it)."""
    if isinstance(value, int) and not isinstance(value, bool) and math.log2(abs(value) + 1) > 100:
        return "a huge number"
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
