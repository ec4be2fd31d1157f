"""Sampled cycles as lanes: rank by rank, host and device, work inside the cycle and beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmeter.reporters.html.charts import WIDTH, axis, draw, label, names_axis, phase_colour
from specmeter.reporters.html.facts import Cycles, cycles_by_rank
from specmeter.trace.device import RingLanes, ring_lanes
from specmeter.trace.plan import phase_of
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns, read_rank, read_windows

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


def timeline_charts(run: Run, ranks: Sequence[Cycles]) -> list[tuple[str, str]]:
    """(name, SVG) of each sampled cycle: host lanes from the tables, device lanes and collectives from the rings.

    A rank on another host has another clock: its cycle of the same number is laid from the same zero.
    """
    if not ranks:
        return []
    shown = ranks[:MOST_RANKS]
    samples = pick_samples(shown[0])
    windows = [[_window(rank, sample, shown[0]) for rank in shown] for sample in samples]
    flat = [(a, b) for row in windows for w in row if w for a, b in [w]]
    spans = read_windows(run.path, flat, _COLUMNS)
    rings, roles = _rings(run, shown), plan_roles(run.plan)
    charts = []
    for sample, row in zip(samples, windows, strict=True):
        marks: list[dict[str, Any]] = []
        for rank, window in zip(shown, row, strict=True):
            if window is not None:
                marks += _marks(spans, rank, window, roles)
                marks += _ring_marks(rings, rank, window)
        if marks:
            charts.append((sample.name, _chart(marks[:MOST_MARKS], sample.dur_ns / 1e6)))
    return charts


def _rings(run: Run, ranks: Sequence[Cycles]) -> RingLanes | None:
    """The run's rings, where it saved any."""
    folder = run.path / "rings"
    if not folder.is_dir() or not any(folder.glob("*.ring")):
        return None
    # Which process is which rank: a table of millions of spans is not read for it as a whole.
    columns = ("pid", "host", "rank", "clock")
    found = (read_rank(run.path, "spans", columns, (one.rank.host, one.rank.rank)) for one in ranks)
    parts = [part for part in found if part]
    if not parts:
        return None
    return ring_lanes(run, {key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def _ring_marks(rings: RingLanes | None, rank: Cycles, window: tuple[int, int]) -> list[dict[str, Any]]:
    """The device's spans and the collectives of one rank inside the window, as rows of the chart."""
    if rings is None:
        return []
    rows = []
    for kind, _title, names, t0, dur, _args in rings.lanes(rank.rank.host, rank.rank.rank, *window):
        for name, begin, length in zip(names.tolist(), t0.tolist(), dur.tolist(), strict=True):
            start, end = (begin - window[0]) / 1e6, (begin + length - window[0]) / 1e6
            rows.append(_row(str(name), f"{rank.rank.name}, {kind}", f"{rank.rank.name}, {kind}", start, end))
    return rows


def _row(name: str, lane: str, where: str, start: float, end: float) -> dict[str, Any]:
    said = f"{name}, {where}: {start:.3f} to {end:.3f} ms, {end - start:.3f} ms"
    return {"lane": lane, "phase": phase_of(name), "from": start, "to": end, "label": said}


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
        row = _row(name, f"{rank.rank.name}, {place}", rank.rank.name, begin, end)
        rows.append({**row, "label": row["label"].replace(name, f"{name}{step}", 1)})
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


def baseline_parts(run: Run, setting: str = "baseline") -> list[tuple[str, float]]:
    """(point, mean ms a cycle) over the baseline's own decode cycles, the largest first; empty without any.

    The cycle itself is none: its own time is what lies between its points.
    """
    ranks = cycles_by_rank(run, setting)
    if not ranks or not ranks[0].chosen.any():
        return []
    lead = ranks[0]
    columns = ("cycle", "point", "clock", "self_ns", "inside")
    spans = read_rank(run.path, "spans", columns, (lead.rank.host, lead.rank.rank))
    if not spans:
        return []
    names, code = np.unique(np.asarray(spans["point"], str), return_inverse=True)
    cycle = np.asarray(spans["cycle"], np.int64)
    keep = (cycle >= 0) & (cycle < len(lead.chosen)) & np.asarray(spans["inside"], bool) & (spans["clock"] == "host")
    keep[keep] &= lead.chosen[cycle[keep]]
    total = np.bincount(code[keep], weights=np.asarray(spans["self_ns"], float)[keep], minlength=len(names))
    mean = total / 1e6 / int(lead.chosen.sum())
    roles = plan_roles(run.plan)
    points = zip(names.tolist(), mean.tolist(), strict=True)
    found = [(name, ms) for name, ms in points if ms > 0 and roles.get(name, name) != "cycle"]
    return sorted(found, key=lambda part: -part[1])
