"""What a deep window did to the server: its cycles against those just before and after, and the time it held them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.build import Trace
from specmeter.trace.cycles import DECODE, KEPT, OUTSIDE
from specmeter.trace.deep_join import Host

MOST = 200
_FEW = 5
_DRAWS = 1000
_MOST_DRAWN = 1000
_IDLE = 5.0  # a cycle so many times the median long waited for requests
_PARTS = ("prepare", "start", "stop", "export")


def window_cost(
    host: Host, meta: Mapping[str, Any], inside: tuple[int, int], pid: int, trace: Trace | None
) -> dict[str, Any]:
    """Mean cycle inside the window and outside of it, ns, with 95 % intervals (bootstrap over cycles), and their ratio.

    Only cycles of as many steps, drafts or none, and requests as most of the window's are compared.
    ``inside_ns``, ``before_ns``, ``after_ns``, ``outside_ns`` (both, or those before where the ones after take longer)
    and ``ratio`` are intervals (``low``, ``point``, ``high``, ``level``, ``method``, ``n``, ``unit``) or None;
    ``reason`` says why there is no ratio. ``left_ratio`` is
    after / before: above 1 the profiler still costs something when it is off.
    ``*_s`` are the seconds that each part took, ``lost_ns`` what the cycles that overlap each part took beyond the mean
    outside.
    """
    length = np.diff(host.starts)
    start, end, number = host.starts[:-1], host.starts[1:], host.numbers[:-1]
    usable, kind = _usable(host, length, pid, trace)
    of = usable & (number >= inside[0]) & (number <= inside[1])
    usable &= kind == _most(kind[of])
    spans = {part: meta.get(f"{part}_ns") for part in _PARTS}
    first = (spans["prepare"] or [meta.get("begin_ns", 0)])[0]
    last = (spans["export"] or spans["stop"] or [0, meta.get("end_ns", 0)])[1]
    between = usable & (start >= (spans["stop"] or [0, last])[1]) & (end <= (spans["export"] or [last])[0])
    before = _last(usable & (end <= first), MOST)
    after = _first(between | (usable & (start >= last)), MOST)
    left = _ratio(length[after], length[before])[0]
    # Where the profiler still costs something afterwards, only the cycles before are without it.
    outside = before if left and left["low"] > 1 else before | after
    means = {"inside": of, "before": before, "after": after, "outside": outside}
    cost: dict[str, Any] = {f"{name}_ns": _mean(length[keep]) for name, keep in means.items()}
    cost["ratio"], cost["reason"] = _ratio(length[of], length[outside])
    cost["left_ratio"] = left
    for part, span in spans.items():
        cost[f"{part}_s"] = (span[1] - span[0]) / 1e9 if span else None
    usual = float(np.mean(length[outside])) if bool(outside.any()) else None
    cost["lost_ns"] = {
        part: _lost(start, end, length, span, usual) for part, span in spans.items() if span and usual is not None
    }
    return cost


def _usable(
    host: Host, length: NDArray[np.int64], pid: int, trace: Trace | None
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Decode cycles that did not wait for requests, and a number for what each ran: steps, drafts or none, batch."""
    usable = np.ones(len(length), bool)
    kind = np.zeros(len(length), np.int64)
    if len(length):
        usable = length <= _IDLE * float(np.median(length))
    ranks = [rank for rank in trace.ranks if pid in {rank.pid, *(part.pid for part in rank.spans)}] if trace else []
    if ranks:
        table = ranks[0].cycles
        # A worker's cycles lie inside those of its core: the nearest one that began before says what kind it is.
        at = np.searchsorted(table.t0_ns, host.starts[:-1] + 1, side="right") - 1
        drop = table.drop[at]
        usable &= (at >= 0) & (table.kind[at] == DECODE) & ((drop == KEPT) | (drop == OUTSIDE))
        kind = (
            (table.steps[at].astype(np.int64) << 32) + (table.batch[at].astype(np.int64) << 1) + (table.drafted[at] > 0)
        )
    return usable, kind


def _most(kinds: NDArray[np.int64]) -> int:
    """The most frequent number, -1 without any."""
    values, counts = np.unique(kinds, return_counts=True)
    return int(values[np.argmax(counts)]) if len(values) else -1


def _lost(
    start: NDArray[np.int64], end: NDArray[np.int64], length: NDArray[np.int64], span: list[int], usual: float
) -> float:
    """What the cycles that overlap a span took beyond the usual; a cycle without requests counts the span alone."""
    over = (end > span[0]) & (start < span[1])
    return float(np.minimum(np.maximum(length[over] - usual, 0.0), span[1] - span[0]).sum())


def _last(keep: NDArray[np.bool_], most: int) -> NDArray[np.bool_]:
    out = np.zeros(len(keep), bool)
    out[np.flatnonzero(keep)[-most:]] = True
    return out


def _first(keep: NDArray[np.bool_], most: int) -> NDArray[np.bool_]:
    out = np.zeros(len(keep), bool)
    out[np.flatnonzero(keep)[:most]] = True
    return out


def _draw(values: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Means of resamples."""
    if len(values) > _MOST_DRAWN:  # so many that normal draws do as well, by the central limit theorem
        error = float(values.std(ddof=1)) / len(values) ** 0.5
        return np.random.default_rng(seed).normal(float(values.mean()), error, _DRAWS)
    at = np.random.default_rng(seed).integers(0, len(values), (_DRAWS, len(values)))
    means: NDArray[np.float64] = values[at].mean(axis=1)
    return means


def _interval(draws: NDArray[np.float64], point: float, count: int) -> dict[str, Any]:
    low, high = np.percentile(draws, (2.5, 97.5))
    ends = {"low": float(low), "point": point, "high": float(high)}
    return {**ends, "level": 0.95, "method": "bootstrap", "n": count, "unit": "cycle"}


def _mean(values: NDArray[np.int64]) -> dict[str, Any] | None:
    if len(values) < _FEW:
        return None
    return _interval(_draw(values, 0), float(values.mean()), len(values))


def _ratio(inside: NDArray[np.int64], outside: NDArray[np.int64]) -> tuple[dict[str, Any] | None, str]:
    for name, values in (("inside", inside), ("just before and after", outside)):
        if len(values) < _FEW:
            return None, f"{len(values)} decode cycles {name} the window are too few to compare"
    point = float(inside.mean() / outside.mean())
    return _interval(_draw(inside, 1) / _draw(outside, 2), point, len(inside)), ""
