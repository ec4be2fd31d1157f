"""The plan as arrays: what a record's point id means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError

CYCLE, LEAF, SPAN, MARK, WAIT, OVERLAPPED = range(6)
ROLES = ("cycle", "leaf", "span", "mark", "wait", "overlapped")
UNKNOWN = 255
PHASES = ("draft", "verify", "accept", "extend", "kv", "schedule", "wait", "other")
_IDS = 1 << 16


@dataclass(frozen=True)
class PlanIndex:
    """The plan's points by id.

    ``names`` are the distinct point names; several sites may share one. ``name_of``, ``role_of`` and ``loop_of`` have
    one entry for each of the 65,536 ids: the index in ``names`` (-1 unknown), the role code (255 unknown), and whether
    the site runs once a draft step. ``roles`` and ``loops`` go with ``names``; ``values`` maps a value id to (index of
    the owning name, value name), ``modes`` a forward mode of the engine to 0 decode, 1 prefill, 2 mixed.
    """

    names: tuple[str, ...]
    roles: tuple[int, ...]
    loops: tuple[bool, ...]
    name_of: NDArray[np.int16]
    role_of: NDArray[np.uint8]
    loop_of: NDArray[np.bool_]
    values: dict[int, tuple[int, str]]
    modes: dict[int, int]

    def with_role(self, *roles: int) -> list[int]:
        """The indices of the names that have one of ``roles``."""
        return [index for index, role in enumerate(self.roles) if role in roles]


def index_plan(plan: Mapping[str, Any]) -> PlanIndex:
    """Turn a plan (see docs/architecture.md) into a PlanIndex. Raises SpecmeterError for a malformed plan."""
    try:
        return _index(plan)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SpecmeterError("The plan is malformed", f"{type(error).__name__}: {error}") from error


def phase_of(name: str) -> str:
    """The phase that a point name belongs to: its part before the dot, or ``other`` for an unknown one."""
    head = name.split(".", 1)[0]
    return head if head in PHASES else "other"


def _index(plan: Mapping[str, Any]) -> PlanIndex:
    names: dict[str, int] = {}
    roles: list[int] = []
    loops: list[bool] = []
    name_of = np.full(_IDS, -1, np.int16)
    role_of = np.full(_IDS, UNKNOWN, np.uint8)
    loop_of = np.zeros(_IDS, bool)
    for point in plan["points"]:
        name, identity = str(point["name"]), int(point["id"])
        role = ROLES.index(point["role"])
        if not 0 < identity < 0xFFF0:
            raise ValueError(f"point id {identity} is out of range")
        if name not in names:
            names[name] = len(names)
            roles.append(role)
            loops.append(False)
        index = names[name]
        loop_of[identity] = point.get("step") == "loop"
        loops[index] = loops[index] or bool(loop_of[identity])
        name_of[identity] = index
        role_of[identity] = role
    values: dict[int, tuple[int, str]] = {}
    for key, identity in plan.get("value_ids", {}).items():
        owner, _, value = key.rpartition(".")
        if not 0 < int(identity) < 0xFFF0:
            raise ValueError(f"value id {identity} is out of range")
        if owner in names:
            values[int(identity)] = (names[owner], value)
    return PlanIndex(tuple(names), tuple(roles), tuple(loops), name_of, role_of, loop_of, values, _modes(plan))


def _modes(plan: Mapping[str, Any]) -> dict[int, int]:
    given = plan.get("modes") or {"decode": [0], "prefill": [1], "mixed": [2]}
    codes = {"decode": 0, "prefill": 1, "mixed": 2}
    return {int(value): codes[kind] for kind, numbers in given.items() for value in numbers}
