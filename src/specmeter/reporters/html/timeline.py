"""Sampled cycles as lanes: rank by rank, host and device, work inside the cycle and beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.reporters.html.charts import WIDTH, axis, draw, label, names_axis, phase_colour
from specmeter.reporters.html.facts import Cycles, cycles_by_rank, read_columns, read_windows
from specmeter.trace.plan import phase_of
from specmeter.trace.tables import Columns

_COLUMNS = ("host", "pid", "rank", "point", "step", "clock", "t0_ns", "dur_ns", "inside")
MOST_RANKS = 16
MOST_MARKS = 1500


@dataclass(frozen=True)
class Sample:
    """One cycle to show: a name for it, its number in the leading rank, and its time on that rank's host, ns."""

    name: str
    cycle: int
    t0_ns: int
    dur_ns: int


def pick_samples(cycles: Cycles) -> list[Sample]:
    """A usual, a quick, a slow and the slowest cycle, and two drawn at random (seeded), without repetition."""
    at = np.flatnonzero(cycles.chosen)
    if not len(at):
        return []
    dur = np.asarray(cycles.table["dur_ns"], np.int64)
    order = at[np.argsort(dur[at], kind="stable")]
    last = len(order) - 1
    drawn = np.random.default_rng(0).choice(at, min(2, len(at)), replace=False)
    wanted = [
        ("median", int(order[round(0.5 * last)])),
        ("5th percentile", int(order[round(0.05 * last)])),
        ("95th percentile", int(order[round(0.95 * last)])),
        ("slowest", int(order[last])),
        *(("random", int(i)) for i in drawn),
    ]
    found: dict[int, Sample] = {}
    for name, i in wanted:
        if i not in found:
            t0, long = int(cycles.table["t0_ns"][i]), int(dur[i])
            title = f"{name}: cycle {int(cycles.table['cycle'][i])}, {long / 1e6:.2f} ms"
            found[i] = Sample(title, i, t0, long)
    return list(found.values())


def timeline_charts(folder: Path, ranks: Sequence[Cycles], roles: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, SVG) of each sampled cycle. ``roles`` gives the plan's role of each point name.

    A rank on another host has another clock: its cycle of the same number is laid from the same zero.
    """
    if not ranks:
        return []
    shown = ranks[:MOST_RANKS]
    samples = pick_samples(shown[0])
    windows = [[_window(rank, sample, shown[0]) for rank in shown] for sample in samples]
    flat = [(a, b) for row in windows for w in row if w for a, b in [w]]
    spans = read_windows(folder, flat, _COLUMNS) if flat else {}
    charts = []
    for sample, row in zip(samples, windows, strict=True):
        marks = [m for rank, w in zip(shown, row, strict=True) if w for m in _marks(spans, rank, w, roles)]
        if marks:
            charts.append((sample.name, _chart(marks[:MOST_MARKS], sample.dur_ns / 1e6)))
    return charts


def _window(rank: Cycles, sample: Sample, lead: Cycles) -> tuple[int, int] | None:
    """The time of the sampled cycle on this rank's host."""
    if rank.rank.host == lead.rank.host:
        return sample.t0_ns, sample.t0_ns + sample.dur_ns
    if sample.cycle >= len(rank.table["t0_ns"]):
        return None
    t0 = int(rank.table["t0_ns"][sample.cycle])
    return t0, t0 + max(int(rank.table["dur_ns"][sample.cycle]), 1)


def _marks(spans: Columns, rank: Cycles, window: tuple[int, int], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The leaves and waits of one rank that begin inside the window, as rows of the chart."""
    if not spans:
        return []
    t0 = np.asarray(spans["t0_ns"], np.int64)
    keep = (spans["rank"] == rank.rank.rank) & (spans["host"] == rank.rank.host) & (t0 >= window[0]) & (t0 < window[1])
    rows = []
    for i in np.flatnonzero(keep).tolist():
        name = str(spans["point"][i])
        if roles.get(name, "leaf") in ("cycle", "span", "mark"):
            continue
        begin = (int(t0[i]) - window[0]) / 1e6
        end = min(begin + int(spans["dur_ns"][i]) / 1e6, (window[1] - window[0]) / 1e6)
        place = str(spans["clock"][i]) if spans["inside"][i] else f"{spans['clock'][i]}, beside"
        step = f", draft step {int(spans['step'][i])}" if spans["step"][i] else ""
        rows.append(
            {
                "lane": f"{rank.rank.name}, {place}", "phase": phase_of(name), "from": begin, "to": end,
                "label": f"{name}{step}, {rank.rank.name}: {begin:.3f} to {end:.3f} ms, {end - begin:.3f} ms",
            }
        )  # fmt: skip
    return rows


def _chart(rows: list[dict[str, Any]], ms: float) -> str:
    return draw(
        {
            "mark": {"type": "bar", "stroke": "var(--bg)", "strokeWidth": 0.3},
            "width": WIDTH,
            "height": {"step": 24},
            "encoding": {
                "y": {
                    "field": "lane", "type": "nominal", "sort": None,
                    "axis": names_axis(None, {row["lane"] for row in rows}),
                },
                "x": {
                    "field": "from", "type": "quantitative", "axis": axis("ms since the cycle began"),
                    "scale": {"domain": [0, ms], "nice": False},
                },
                "x2": {"field": "to"},
                "color": phase_colour([row["phase"] for row in rows]),
                "description": label(),
            },
        },
        rows,
    )  # fmt: skip


def plan_roles(plan: Mapping[str, Any]) -> dict[str, str]:
    """The role of each point name in a plan; empty for a run without one."""
    return {str(p.get("name")): str(p.get("role")) for p in plan.get("points", ()) if isinstance(p, Mapping)}


def baseline_parts(folder: Path, setting: str = "baseline") -> list[tuple[str, float]]:
    """(point, mean ms a cycle) over the baseline's own decode cycles, the largest first; empty without any."""
    ranks = cycles_by_rank(folder, setting)
    if not ranks or not ranks[0].chosen.any():
        return []
    lead = ranks[0]
    spans = read_columns(folder, "spans", ("host", "rank", "cycle", "point", "self_ns", "inside"), lead.rank)
    if not spans:
        return []
    names, code = np.unique(np.asarray(spans["point"], str), return_inverse=True)
    cycle = np.asarray(spans["cycle"], np.int64)
    keep = (cycle >= 0) & (cycle < len(lead.chosen)) & np.asarray(spans["inside"], bool)
    keep[keep] &= lead.chosen[cycle[keep]]
    total = np.bincount(code[keep], weights=np.asarray(spans["self_ns"], float)[keep], minlength=len(names))
    mean = total / 1e6 / int(lead.chosen.sum())
    found = [(str(name), float(ms)) for name, ms in zip(names, mean, strict=True) if ms > 0 and name != "cycle"]
    return sorted(found, key=lambda part: -part[1])
