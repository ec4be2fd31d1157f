"""Whether the knobs of an arm are what its server runs with: engines rewrite flags and variables by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specmeter.bench.arms import CompareArm
from specmeter.bench.resolved import MAX_VALUE, command_flags
from specmeter.trace.masking import MASK, mask_command, mask_env

_VLLM_STEPS = re.compile(r"\bnum_spec(?:ulative)?_tokens=(\d+)")
_OFF = ("none", "")


@dataclass(frozen=True)
class Knob:
    """One flag, variable or setting as ``asked`` for, and as ``found`` in the server (None: it does not tell).

    ``holds`` is None where the two cannot be compared: a path, a document, ``auto``.
    """

    knob: str
    asked: str
    found: str | None
    holds: bool | None

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def knobs_of(arm: CompareArm, resolved: Mapping[str, str], command: bool = True) -> list[Knob]:
    """The knobs of an arm against what ``resolved_arguments`` found; secrets are masked on both sides.

    A flag is compared where the engine tells an argument of its name; ``command`` False looks at variables only, where
    several arms share a server.
    """
    found = [
        _knob(name, value, resolved.get(f"env.{name}"), absent="(not set)")
        for name, value in sorted(mask_env(dict(arm.spec.env)).items())
    ]
    if not command:
        return found
    for name, value in command_flags(mask_command(arm.spec.command)).items():
        told = resolved.get(name.replace("-", "_"))
        if told is not None:
            found.append(_knob(f"--{name}", value, told))
    return [*found, *_speculation(arm, resolved)]


def _speculation(arm: CompareArm, resolved: Mapping[str, str]) -> list[Knob]:
    """The step count where no flag of its own carries it (vLLM), and that a baseline does not speculate."""
    if arm.setting is None:
        return []
    told = resolved.get("speculative_config", resolved.get("speculative_algorithm"))
    if told is None:
        return []
    if arm.setting.steps == 0:
        return [Knob("speculation", "off", told, told.strip().lower() in _OFF)]
    steps = _VLLM_STEPS.search(told)
    if steps is None:
        return []
    return [Knob("draft steps", str(arm.setting.steps), steps.group(1), int(steps.group(1)) == arm.setting.steps)]


def _knob(name: str, asked: str, found: str | None, absent: str | None = None) -> Knob:
    asked, found = asked[:MAX_VALUE], absent if found is None else found
    if found is None or any(_incomparable(text) for text in (asked, found)):
        return Knob(name, asked, found, None)
    return Knob(name, asked, found, _plain(asked) == _plain(found))


def _incomparable(text: str) -> bool:
    return len(text) >= MAX_VALUE or text.lower() == "auto" or any(part in text for part in (MASK, "/", "{", "<"))


# "on" is what a switch has in a command; the others are torch's own second names.
_ALIASES = {"on": "true", "half": "float16", "float": "float32", "double": "float64"}


def _plain(text: str) -> str | float:
    """A value as it reads without the marks that one program puts around it and another does not."""
    words = re.sub(r"[\[\]()'\",\s]+", " ", text).strip().lower().removeprefix("torch.")
    try:
        return float(words)
    except ValueError:
        return _ALIASES.get(words, words)


def not_held(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A warning for each knob that the server does not run with: what was measured is not that setting."""
    return [
        f"{row['arm']}: {row['knob']} is {row['found']} in the server and not {row['asked']}, as was asked for; the "
        "figures are of what it is"
        for row in rows
        if row["holds"] is False
    ]
