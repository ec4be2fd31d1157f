"""What a report shows of deep windows: ``document["device"]["windows"]``, one entry a process (docs/device-time.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specmeter.analysis.device_idle import idle_facts
from specmeter.analysis.device_join import NOWHERE, Joined, Mask, chosen_cycles, facts_of, join
from specmeter.analysis.device_time import DeviceTime, device_time
from specmeter.analysis.graph_steps import graph_steps
from specmeter.analysis.kernel_classes import CLASSES, LM_HEAD, LM_HEAD_FACTOR, OTHER, PROBE, Patterns
from specmeter.analysis.stalls import without_stalls
from specmeter.trace.build import Trace
from specmeter.trace.deep import DeepWindow
from specmeter.trace.plan import PHASES, phase_of

MOST_UNKNOWN = 10
MOST_OPERATORS = 15
UNKNOWN = -1


@dataclass(frozen=True)
class Group:
    """Cycles alike: ``plain`` (no drafts), requests in the batch, draft steps, and whether verify replayed a graph.

    -1 where a number is not known. ``cycles`` is a mask over the rank's cycles.
    """

    plain: bool
    batch: int
    steps: int
    graph: bool
    cycles: Mask

    @property
    def count(self) -> int:
        """How many cycles."""
        return int(np.count_nonzero(self.cycles))

    def facts(self) -> dict[str, Any]:
        """The group as a report names it."""
        known = {name: value if value >= 0 else None for name, value in (("batch", self.batch), ("steps", self.steps))}
        return {"kind": "plain" if self.plain else "decode", **known, "graph": self.graph, "cycles": self.count}


def cycle_groups(joined: Joined, chosen: Mask) -> list[Group]:
    """The chosen cycles by kind, speculative before plain ones, the most frequent first: never averaged together.

    Stalls of the machine are left out, by the one rule of all analyses (analysis/stalls.py).
    """
    table = joined.rank.cycles
    phases = np.array([phase_of(name) for name in joined.index.names] + [""])
    replayed = joined.window.kernels["graph_launch"] & (phases[joined.name] == "verify") & (joined.cycle >= 0)
    hit = np.zeros(len(table), bool)
    hit[joined.cycle[replayed]] = True
    keys = np.stack([table.drafted == 0, table.batch, np.where(table.drafted == 0, 0, table.steps), hit], axis=1)
    found = []
    for key in np.unique(keys[chosen], axis=0):
        plain, batch, steps, graph = (int(part) for part in key)
        alike = without_stalls(table.dur_ns, chosen & (keys == key).all(axis=1))
        found.append(Group(bool(plain), batch, steps, bool(graph), alike))
    return sorted(found, key=lambda group: (group.plain, -group.count))


def window_facts(
    trace: Trace, window: DeepWindow, requests: Mask | None = None, patterns: Patterns | None = None
) -> dict[str, Any]:
    """All that is known of one process's window. ``reason`` says why the tables are not there, where they are not.

    ``requests`` chooses among the trace's requests, as in the rest of the analysis.
    """
    facts: dict[str, Any] = {**facts_of(window), "reason": "", "cycles": None, "verdict": None}
    joined = join(trace, window, patterns)
    if joined is None:
        return {**facts, "reason": "the trace holds no spans of this process"}
    chosen = chosen_cycles(joined, requests)
    if not chosen.any():
        return {**facts, "reason": _why_none(joined)}
    groups = cycle_groups(joined, chosen)
    first = groups[0]
    stalled = int(np.count_nonzero(chosen)) - sum(group.count for group in groups)
    others = [_other(joined, group) for group in groups[1:]]
    facts["cycles"] = {**first.facts(), "stalled": stalled, "others": others}
    facts["classes"] = list(_classes(joined, first.cycles))
    if window.on_cpu:
        why = "recorded on a CPU: the entries are operators of the host, and no device's time can be told"
        return {**facts, "reason": why, "operators": _longest(joined, first.cycles, None, MOST_OPERATORS)}
    found, blame = device_time(joined, first.cycles)
    return {
        **facts,
        **_tables(found),
        "idle": idle_facts(joined, first.cycles, blame),
        "unknown": _longest(joined, first.cycles, OTHER, MOST_UNKNOWN),
        "lm_head": _lm_head(joined, first.cycles),
        "graphs": list(_graphs(joined, groups)),
        "draft_steps": graph_steps(joined, first.cycles),
        "verdict": {"word": found.bound.word, "sentence": _sentence(found)},
    }


def device_facts(
    found: Mapping[str, Any] | None,
    trace: Trace,
    windows: Sequence[DeepWindow],
    requests: Mask | None = None,
    patterns: Patterns | None = None,
) -> dict[str, Any] | None:
    """``document["device"]``: what the always-on spans gave (``found``, None in older runs) and the windows."""
    if not windows:
        return dict(found) if found else None
    return {**(found or {}), "windows": [window_facts(trace, w, requests, patterns) for w in windows]}


def _why_none(joined: Joined) -> str:
    if not len(joined.t0):
        return "the profiler saw no kernel"
    if not (joined.cycle >= 0).any():
        return "none of its kernels was launched in a cycle that the probes saw"
    return "no decode cycle that counts lies wholly inside the window"


def _tables(found: DeviceTime) -> dict[str, Any]:
    times = {name: getattr(found, name).as_json() for name in ("cycle_ms", "period_ms", "busy_ms", "idle_ms")}
    return {
        **times,
        "idle_percent": found.idle_percent,
        "phases": [asdict(row) for row in found.phases],
        "coverage": {
            "leaf_percent": found.leaf_percent,
            "glue_percent": found.glue_percent,
            "outside_percent": found.outside_percent,
        },
        "bound": asdict(found.bound),
    }


def _other(joined: Joined, group: Group) -> dict[str, Any]:
    if joined.window.on_cpu:
        return group.facts()
    found, _ = device_time(joined, group.cycles)
    times = {name: getattr(found, name).point for name in ("period_ms", "busy_ms", "idle_ms")}
    return {**group.facts(), **times, "bound": found.bound.word}


def kernels_of(joined: Joined, cycles: Mask) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The positions of the kernels that some cycles launched."""
    return np.flatnonzero((joined.cycle >= 0) & cycles[np.maximum(joined.cycle, 0)])


def phase_numbers(joined: Joined, at: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The phase of each kernel as an index in PHASES; of no point: the last one, other."""
    phases = np.array([PHASES.index(phase_of(name)) for name in joined.index.names] + [len(PHASES) - 1])
    found: np.ndarray[Any, np.dtype[np.int64]] = phases[joined.name[at]]
    return found


def _classes(joined: Joined, cycles: Mask) -> Iterator[dict[str, Any]]:
    """Rows of (phase, class): mean ms and kernels a cycle, percent of the phase's busy time."""
    at, count = kernels_of(joined, cycles), int(np.count_nonzero(cycles))
    phase, kind, added = phase_numbers(joined, at), joined.kind[at], joined.added[at]
    for number, name in enumerate(PHASES):
        mine = phase == number
        total = float(added[mine].sum())
        rows = []
        for code in np.unique(kind[mine]).tolist():
            of = mine & (kind == code)
            ns = float(added[of].sum())
            row = {"phase": name, "class": CLASSES[code], "ms": ns / count / 1e6}
            rows.append({**row, "percent": 100 * ns / total if total else 0.0, "kernels": of.sum() / count})
        yield from sorted(rows, key=lambda row: -row["ms"])


def _longest(joined: Joined, cycles: Mask, code: int | None, most: int) -> list[dict[str, Any]]:
    """The names of a class (None: of all) by time: mean ms and calls a cycle, percent of the busy time."""
    at, count = kernels_of(joined, cycles), int(np.count_nonzero(cycles))
    total = float(joined.added[at].sum())
    mine = at[joined.kind[at] == code] if code is not None else at
    name = joined.window.kernels["name"][mine]
    ns = np.bincount(name, weights=joined.added[mine], minlength=len(joined.window.names))
    calls = np.bincount(name, minlength=len(joined.window.names))
    listed = np.flatnonzero(calls)
    listed = listed[np.argsort(-ns[listed], kind="stable")][:most]
    return [
        {
            "name": joined.window.names[i], "ms": float(ns[i]) / count / 1e6, "kernels": float(calls[i]) / count,
            "percent": 100 * float(ns[i]) / total if total else 0.0,
        }
        for i in listed.tolist()
    ]  # fmt: skip


def _lm_head(joined: Joined, cycles: Mask) -> list[dict[str, Any]]:
    """By point: lm_heads a cycle, and how they were told from other GEMMs."""
    at, count = kernels_of(joined, cycles), int(np.count_nonzero(cycles))
    rows = []
    for name in np.unique(joined.name[at][joined.kind[at] == LM_HEAD]).tolist():
        point = joined.index.names[name] if name >= 0 else ""
        own = point.rpartition(".")[2] in ("head", "logits", "lm_head")
        how = "the point's GEMMs" if own else f"last GEMM of the forward, {LM_HEAD_FACTOR:g} x its median GEMM or more"
        kernels = int(np.count_nonzero((joined.name[at] == name) & (joined.kind[at] == LM_HEAD)))
        rows.append({"point": point, "kernels": kernels / count, "rule": how})
    return rows


def _graphs(joined: Joined, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """By phase and batch: cycles that launched something, those that replayed a graph, and the graph's padded size.

    The profiler names no grid in a window's columns and engines no size, so the padded size is not seen.
    """
    batches = sorted({group.batch for group in groups})
    for batch in batches:
        cycles = np.logical_or.reduce([group.cycles for group in groups if group.batch == batch])
        at = kernels_of(joined, cycles)
        phase, graph = phase_numbers(joined, at), joined.window.kernels["graph_launch"][at]
        for number, name in enumerate(PHASES):
            mine = at[(phase == number) & (joined.kind[at] != PROBE) & (joined.name[at] != NOWHERE)]
            hit = at[(phase == number) & graph]
            if len(mine):
                launched, replayed = (len(np.unique(joined.cycle[part])) for part in (mine, hit))
                row = {"phase": name, "batch": batch if batch >= 0 else None, "cycles": launched}
                yield {**row, "graph_cycles": replayed, "padded": None, "reason": "not seen"}


def _sentence(found: DeviceTime) -> str:
    busy, idle, bound = found.busy_ms.point, found.idle_ms.point, found.bound
    parts = {
        "idle because of the host": bound.host, "idle while the host waits": bound.waiting,
        "collectives": bound.communication, "other work": bound.device,
    }  # fmt: skip
    shares = ", ".join(f"{100 * share:.0f} % {what}" for what, share in parts.items() if share >= 0.005)
    return (
        f"The cycle is {bound.word}: of {found.period_ms.point:.3f} ms the device is busy for {busy:.3f} ms and idle "
        f"for {idle:.3f} ms. By cause: {shares}."
    )
