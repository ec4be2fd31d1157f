"""The verdict of a check in words. Standard library of 3.9: a check on another host says it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmeter.reporters.inert import inert


def wiring_word(document: Mapping[str, Any]) -> str:
    """The verdict in one word, for programs and for its style: ``right``, ``wrong``, ``doubtful`` or ``unknown``."""
    if document["errors"]:
        return "wrong"
    trained = document["trained"]["states"]
    if trained is None or any(found["id"] == "head-kind" for found in document["findings"]):
        return "unknown"
    fed = [feed["states"] for feed in document["feeds"] if feed["used_by_default"]]
    return "right" if all(each == trained for each in fed) else "doubtful"


def check_sentence(document: Mapping[str, Any]) -> str:
    """The verdict in plain words: whether every engine feeds the head what it was trained on."""
    errors = [f for f in document["findings"] if f["severity"] == "error"]
    warnings = sum(f["severity"] == "warning" for f in document["findings"])
    more = f"; {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    if errors:
        rest = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return f"Wiring is wrong: {inert(errors[0]['what'], 240).rstrip('.')}{rest}{more}."
    unknown = next((f for f in document["findings"] if f["id"] == "head-kind"), None)
    if unknown is not None:
        return f"Wiring cannot be told: {inert(unknown['what'], 240).rstrip('.')}{more}."
    trained = document["trained"]["states"]
    if trained is None:
        return f"No fault found, but what the head was trained on is not known{more}."
    other = next((f for f in document["feeds"] if f["used_by_default"] and f["states"] != trained), None)
    if other is not None:
        name = inert(f"{other['engine']} {other['engine_version'] or ''}".strip(), 40)
        fed = "does not run it" if other["refusal"] else f"feeds {states(other['states'])}"
        return f"Wiring is in doubt: {name} {fed}, the head was trained on {states(trained)}{more}."
    return f"Wiring is right: the head is fed {states(trained)}, what it was trained on{more}."


def states(listed: list[int] | None) -> str:
    """``H[3], H[16], H[28]``."""
    return "an unknown choice of states" if listed is None else ", ".join(f"H[{k}]" for k in listed)
