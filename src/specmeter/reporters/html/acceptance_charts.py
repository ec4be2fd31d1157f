"""Acceptance: by draft position, by kind of prompt, by length of prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.stats import Interval, cluster_ratio
from specmeter.reporters.html.charts import axis, draw, label, names_axis, series_colour
from specmeter.reporters.html.facts import Cycles
from specmeter.reporters.numbers import accept_range, bounds, percent
from specmeter.trace.rundir import Run

MOST_KINDS = 12


@dataclass(frozen=True)
class Group:
    """Cycles of one kind or length of prompt: accept length with its interval over requests, cycles, requests, and the
    most draft steps of one of its cycles (-1: not known)."""

    name: str
    length: Interval
    cycles: int
    requests: int
    steps: int


def positions_chart(positions: Sequence[Mapping[str, Any]]) -> str:
    """Kept shares by draft position, of all drafted and given that the one before was kept."""
    rows = []
    for place in positions:
        for key, name in (("cumulative", "kept, of all drafted"), ("conditional", "kept, if the one before was")):
            if place[key] is not None:
                text = f"position {place['position']}: {percent(place[key])} {name}"
                rows.append({"at": place["position"], "series": name, "share": place[key], "label": text})
    return draw(
        {
            "mark": {"type": "bar"},
            "height": 180,
            "encoding": {
                "x": {"field": "at", "type": "ordinal", "axis": axis("draft position", labelAngle=0)},
                "xOffset": {"field": "series", "sort": None},
                "y": {
                    "field": "share", "type": "quantitative", "scale": {"domain": [0, 1]},
                    "axis": axis("kept", format=".0%"),
                },
                "color": series_colour(["kept, of all drafted", "kept, if the one before was"]),
                "description": label(),
            },
        },
        rows,
    )  # fmt: skip


def groups_by_kind(cycles: Cycles) -> list[Group]:
    """Accept length by prompt kind: the prompt's name without its number; kinds beyond 12 are left out."""
    prompts = np.asarray(cycles.table["prompt_id"], str)
    return _groups(cycles, np.array([kind_of(name) for name in prompts.tolist()], str))[:MOST_KINDS]


def kind_of(prompt_id: str) -> str:
    """``code`` of ``code-3``; the whole name where it has no number, ``(none)`` for an empty one."""
    return re.sub(r"[-_]?\d+$", "", prompt_id) or ("(none)" if not prompt_id else "prompt")


def groups_by_length(run: Run, cycles: Cycles) -> list[Group]:
    """Accept length by prompt length, in doubling buckets of tokens."""
    asked = run.requests
    if not asked:
        return []
    tokens = {str(p): int(n) for p, n in zip(asked["prompt_id"], asked["prompt_tokens"], strict=True) if n > 0}
    names = np.asarray(cycles.table["prompt_id"], str)
    size = np.array([tokens.get(name, 0) for name in names.tolist()])
    power = np.floor(np.log2(np.maximum(size, 1))).astype(int)
    buckets = np.array([f"{2**p}-{2 ** (p + 1) - 1}" if n else "" for p, n in zip(power, size, strict=True)], str)
    groups = _groups(cycles, buckets, drop_empty=True)
    return sorted(groups, key=lambda group: int(group.name.split("-")[0]))


def _groups(cycles: Cycles, keys: NDArray[Any], drop_empty: bool = False) -> list[Group]:
    table = cycles.table
    sampled, batch = np.asarray(table["sampled"], np.int64), np.maximum(np.asarray(table["batch"], np.int64), 1)
    known = cycles.counted & (sampled >= 0) & ((keys != "") if drop_empty else True)
    unit = np.array(
        [f"{b}/{p}/{s}" for b, p, s in zip(table["block"], table["prompt_id"], table["setting"], strict=True)]
    )
    found = []
    for key in np.unique(keys[known]).tolist():
        at = known & (keys == key)
        _, group = np.unique(unit[at], return_inverse=True)
        length = cluster_ratio(np.bincount(group, sampled[at]), np.bincount(group, batch[at]), "request")
        found.append(Group(str(key), length, int(at.sum()), int(group.max()) + 1, int(table["steps"][at].max())))
    return sorted(found, key=lambda g: -g.length.point)


def groups_chart(groups: Sequence[Group], title: str, break_even: float | None) -> str:
    """Accept length of each group with its interval, and the break-even line where it is known."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        ends = bounds(group.length.as_json(), *accept_range(group.steps))
        said = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else ""
        text = f"{group.name}: {group.length.point:.2f} tokens a cycle{said}, {group.requests} requests"
        low, high = ends or (group.length.point, group.length.point)
        rows.append({"group": group.name, "length": group.length.point, "low": low, "high": high, "label": text})
    y = {"field": "group", "type": "nominal", "axis": names_axis(title, [g.name for g in groups]), "sort": None}
    x = {"field": "length", "type": "quantitative", "axis": axis("tokens a cycle"), "scale": {"zero": False}}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "rule", "strokeWidth": 2, "color": "var(--s0)", "aria": False},
            "encoding": {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "color": "var(--s0)", "opacity": 1},
            "encoding": {"y": y, "x": x, "description": label()},
        },
    ]
    if break_even is not None:
        line = [{"at": break_even, "label": f"break-even: {break_even:.2f} tokens"}]
        layers.append(
            {
                "data": {"values": line},
                "mark": {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 2},
                "encoding": {"x": {"field": "at", "type": "quantitative"}, "description": label()},
            }
        )
    return draw({"layer": layers, "height": {"step": 26}}, rows)
