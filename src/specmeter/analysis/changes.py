"""What two saved runs had set differently: command, settings, versions, machine, points."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specmeter.analysis.setting_names import shown_setting
from specmeter.trace.rundir import Run

_LEFT_OUT = ("id", "schema", "created_ns", "status")


@dataclass(frozen=True)
class Change:
    """One fact that differs; ``a`` or ``b`` is None where that run does not state it."""

    name: str
    a: str | None
    b: str | None


# What the load of a run is called, and the option that sets it.
_LOAD = {"set": "prompt set", "count": "number of prompts (--requests)", "max_tokens": "answer length (--max-tokens)"}


def changes(a: Run, b: Run) -> list[Change]:
    """The facts of run.json, setting, engine and plan that differ, by name; secrets were masked when saved."""
    left, right = dict(_facts(a)), dict(_facts(b))
    names = sorted(left.keys() | right.keys())
    return [Change(n, left.get(n), right.get(n)) for n in names if left.get(n) != right.get(n)]


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    yield from _flat("", {k: v for k, v in run.run.items() if k not in (*_LEFT_OUT, "settings")})
    settings = run.run.get("settings")
    if isinstance(settings, list):
        # Two runs of one step count do not differ because one took it from the server and the other asked for it.
        yield from _flat("settings", [shown_setting(run, str(name)) for name in settings])
    for key in ("engine", "clock"):
        yield from _flat(f"analysis.{key}", run.analysis.get(key))
    prompts = run.analysis.get("prompts")
    for key, value in (prompts if isinstance(prompts, Mapping) else {"set": prompts}).items():
        yield from _flat(_LOAD.get(str(key), f"analysis.prompts.{key}"), value)
    plan = run.plan
    for key in ("engine", "engine_version", "recipe_sha256", "python"):
        yield from _flat(f"plan.{key}", plan.get(key))
    for point in plan.get("points", []):
        place = f"plan.point {point.get('name')} in {point.get('qualname')}"
        yield f"{place}.text", str(point.get("text"))
        yield f"plan.source of {point.get('module')}", str(point.get("sha256"))
    for refused in plan.get("refused", []):
        yield f"plan.refused {refused.get('name')}", str(refused.get("reason"))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Nested objects as dotted names; a list stays whole, so that a command line is shown as one."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list) and all(isinstance(word, str) for word in value):
        yield name, " ".join(value)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)
