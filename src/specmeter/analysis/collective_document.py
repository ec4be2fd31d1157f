"""``document["collectives"]``: the collectives of a profile's deep windows, over its decode cycles alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.collectives import collectives
from specmeter.analysis.costmodel_collectives import COLLECTIVE, ISSUERS
from specmeter.analysis.device_join import chosen_cycles, join
from specmeter.trace.build import Trace
from specmeter.trace.deep import KERNEL, DeepWindow
from specmeter.trace.plan import phase_of

PLAIN = "baseline"
"""The setting of requests without speculation."""


def collective_facts(
    trace: Trace, windows: Sequence[DeepWindow], requests: NDArray[np.bool_] | None = None
) -> dict[str, Any] | None:
    """What the windows say about collectives, or None where they hold none; ``requests`` chooses as in the analysis.

    ``setting`` is that of the windows: the first one with speculation, if there is any; ``others`` are the same for
    the windows of other settings, plain decoding among them.
    """
    settings = list(dict.fromkeys(window.setting for window in windows))
    settings.sort(key=lambda setting: setting == PLAIN)
    documents = []
    for setting in settings:
        mine = [window for window in windows if window.setting == setting]
        found = _of(trace, mine, requests if setting != PLAIN else None)
        documents += [{**found, "setting": setting}] if found is not None else []
    return {**documents[0], "others": documents[1:]} if documents else None


def _of(trace: Trace, windows: Sequence[DeepWindow], requests: NDArray[np.bool_] | None) -> dict[str, Any] | None:
    """The windows of one setting; of several of one process the last counts."""

    def only(window: DeepWindow) -> NDArray[np.int64]:
        """The numbers, in its ring, of the decode cycles that count; all where the trace lacks the process."""
        joined = join(trace, window)
        if joined is None:
            return np.arange(window.cycles[0], window.cycles[1] + 1, dtype=np.int64)
        chosen = chosen_cycles(joined, requests)
        counted = (joined.cycle >= 0) & chosen[np.maximum(joined.cycle, 0)]
        return np.unique(window.kernels["cycle"][counted]).astype(np.int64)

    kept = {(w.host, w.pid): by_issuer(trace, w) for w in windows if bool((w.kernels["kind"] == KERNEL).any())}
    world = max((rank.world for rank in trace.ranks), default=-1)
    ranks = {rank.rank for rank in trace.ranks if rank.rank >= 0} | set(range(max(world, 0)))
    found = collectives(list(kept.values()), trace.index, trace.clocks, sorted(ranks), only)
    return found.as_json() if found is not None else None


def by_issuer(trace: Trace, window: DeepWindow) -> DeepWindow:
    """The window with what points on collectives launched given to the draft, verify or extend point around them.

    As ``costmodel_collectives.by_issuer`` does with spans: only so is communication a part of the phase that issues it.
    """
    index, kernels = trace.index, window.kernels
    name = np.where(kernels["point"] >= 0, index.name_of[np.maximum(kernels["point"], 0)], -1)
    inner = [i for i, point in enumerate(index.names) if COLLECTIVE.search(point)]
    at = np.flatnonzero(np.isin(name, inner) & (kernels["launch_ns"] >= 0))
    joined = join(trace, window) if len(at) else None
    if joined is None:
        return window
    lane = joined.lane
    issuers = [i for i, point in enumerate(index.names) if phase_of(point) in ISSUERS and i not in inner]
    outer = np.flatnonzero(np.isin(lane.name, issuers))
    outer = outer[np.argsort(lane.t0_ns[outer], kind="stable")]
    if not len(outer):
        return window
    launched = kernels["launch_ns"][at]
    found = outer[np.maximum(np.searchsorted(lane.t0_ns[outer], launched, side="right") - 1, 0)]
    around = (lane.t0_ns[found] <= launched) & (launched < lane.t0_ns[found] + lane.dur_ns[found])
    ids = {number: int(np.flatnonzero(index.name_of == number)[0]) for number in issuers}
    point = kernels["point"].copy()
    point[at[around]] = [ids[number] for number in lane.name[found[around]].tolist()]
    return replace(window, kernels={**kernels, "point": point})
