"""From one exported window and its process's ring to a DeepWindow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.trace.build import Trace
from specmeter.trace.deep_clock import Clock, fit_clock, shift_bounds
from specmeter.trace.deep_cost import window_cost
from specmeter.trace.deep_join import Host
from specmeter.trace.deep_profile import Profile
from specmeter.trace.deep_window import Columns, DeepWindow, kernel_columns, select, sync_columns
from specmeter.trace.spans import nest

NO_DEVICE = "no device: operators on the CPU instead"
# Calls that return after the device has done what they wait for; of the copies only those without "Async" do.
_WAITS = ("Synchronize",)
_BLOCKING = ("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyFromSymbol", "cudaMemcpyToSymbol", "hipMemcpyWithStream")
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "LaunchCooperativeKernel")
_REPLAY = "GraphLaunch"


def build_window(profile: Profile, meta: Mapping[str, Any], host: Host | None, trace: Trace | None) -> DeepWindow:
    """Put a window on the host's clock, and its kernels to points and cycles. ``host`` None: the ring is not there."""
    clock = fit_clock(profile, meta)
    on_cpu = meta["activity"] == "cpu"
    notes = [clock.note] if clock.note else []
    if on_cpu:
        kernels, calls, shift = _operators(profile, meta, clock), _moved(profile.host, clock), 0
        notes.append(NO_DEVICE)
    else:
        kernels, calls, shift = _kernels(profile, clock, notes)
    _check_times(kernels, meta, clock.error_ns + shift)
    waits = profile.holding(calls, *_WAITS) | profile.named(calls, *_BLOCKING)
    syncs = select(calls, waits)
    inside = _joined(profile, meta, host, kernels, calls, syncs, notes)
    sync_names, sync_index = _used(profile.names, syncs["name"])
    names, name_index = _used(profile.names, kernels["name"])
    kernels["name"], syncs["name"] = name_index, sync_index
    if not len(kernels["name"]):
        notes.append("the profiler recorded nothing on the device")
    if not meta.get("complete", True):
        notes.append("the window ended at its deadline, before the cycles that were asked for")
    cost = window_cost(host, meta, inside, meta["pid"], trace) if host is not None else {}
    kernels.pop("correlation", None)
    return DeepWindow(
        meta["pid"], meta["host"], _rank(meta, trace), str(meta.get("device") or ""), meta["begin_ns"], meta["end_ns"],
        inside, names, kernel_columns(**kernels), sync_columns(**_named_syncs(syncs)), sync_names, cost,
        clock.error_ns + shift, on_cpu, tuple(notes), str(meta.get("label") or ""),
    )  # fmt: skip


def _check_times(kernels: Columns, meta: Mapping[str, Any], error_ns: int) -> None:
    """Raise SpecmeterError where nothing that was recorded lies in the window: the file is another window's."""
    t0 = kernels["t0_ns"]
    inside = (t0 >= meta["begin_ns"] - error_ns) & (t0 <= meta["end_ns"] + error_ns)
    if len(t0) and not bool(inside.any()):
        raise SpecmeterError(
            f"The deep window {meta.get('path', '')} is damaged",
            "Nothing that its profile holds lies in its time: the file is another window's.",
            "Leave it out, or record again; its numbers are not shown.",
        )


def _moved(table: Columns, clock: Clock) -> Columns:
    return {**table, "t0_ns": clock.to_host(table["t0_ns"])}


def _kernels(profile: Profile, clock: Clock, notes: list[str]) -> tuple[Columns, Columns, int]:
    """Device activities with the calls that launched them, those calls, and by how much the device's clock is off."""
    calls, device = _moved(profile.host, clock), _moved(profile.device, clock)
    # A call into the runtime may hold one into the driver with the same number: the outer one began first.
    order = np.lexsort((calls["t0_ns"], calls["correlation"]))
    numbers = calls["correlation"][order]
    first = np.ones(len(order), bool)
    first[1:] = numbers[1:] != numbers[:-1]
    order, numbers = order[first], numbers[first]
    at = np.minimum(np.searchsorted(numbers, device["correlation"]), max(len(numbers) - 1, 0))
    known = numbers[at] == device["correlation"] if len(numbers) else np.zeros(len(device["t0_ns"]), bool)
    call = np.full(len(known), -1, np.int64)
    call[known] = order[at[known]]
    replay = np.zeros(len(known), bool)
    replay[known] = profile.holding(calls, _REPLAY)[call[known]]
    kernels = {
        **{name: device[name] for name in ("name", "kind", "stream", "t0_ns", "dur_ns", "bytes", "correlation")},
        "launch_ns": np.where(known, calls["t0_ns"][call] if len(numbers) else 0, -1),
        "launch_dur_ns": np.where(known, calls["dur_ns"][call] if len(numbers) else 0, 0),
        "graph_launch": replay,
        "graph": np.where(replay, device["correlation"], -1),
        "call": call,
    }
    least, most = shift_bounds(kernels, calls, profile.named(calls, *_BLOCKING))
    shift = max(0, least or 0)
    if shift:
        kernels["t0_ns"] = kernels["t0_ns"] + shift
        notes.append(f"the device's clock was {shift / 1000:.1f} us ahead of the host's, and was put back by that")
    if most is not None and most < shift:
        shift += shift - most
        notes.append("the device's clock contradicts the host's: a kernel ended after the copy that waited for it")
    return kernels, calls, shift


def _operators(profile: Profile, meta: Mapping[str, Any], clock: Clock) -> Columns:
    """Operators as kernels of the thread that ran them: each moment belongs to the innermost one."""
    table = _moved(profile.operators, clock)
    own = profile.named(table, str(meta.get("mark_name"))) & (table["thread"] == meta.get("native_thread"))
    table = select(table, ~own)
    parts = []
    for thread in np.unique(table["thread"]).tolist():
        rows = select(table, table["thread"] == thread)
        parts.append(_segments(rows["t0_ns"], rows["dur_ns"], rows["name"], thread))
    if not parts:
        parts = [_segments(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32), 0)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    joined["launch_ns"], joined["launch_dur_ns"] = joined["t0_ns"], joined["dur_ns"]
    order = np.argsort(joined["t0_ns"], kind="stable")
    return select(joined, order)


def _segments(t0: NDArray[np.int64], dur: NDArray[np.int64], name: NDArray[Any], thread: int) -> Columns:
    """The time of nested calls cut into pieces that belong to the innermost call."""
    some = dur > 0  # a call without length would end before it begins, in the order of moments below
    t0, dur, name = t0[some], dur[some], name[some]
    t1 = t0 + dur
    ends = np.lexsort((-t0, t1))
    containers, inner = nest(t0[ends])
    parent = np.full(len(t0), -1, np.int64)
    has = inner >= 0
    parent[ends[has]] = ends[containers[inner[has]]]
    # At its begin a call takes over; at its end the one that called it does.
    moment = np.concatenate([t0, t1])
    owner = np.concatenate([np.arange(len(t0)), parent])
    ending = np.concatenate([np.zeros(len(t0), bool), np.ones(len(t0), bool)])
    rank = np.empty(len(t0), np.int64)
    rank[ends] = np.arange(len(t0))
    # Of equal moments ends come first, inner ones before outer ones, then begins, outer ones first.
    order = np.lexsort((np.concatenate([-rank, rank]), ~ending, moment))
    moment, owner = moment[order], owner[order]
    length = np.diff(moment)
    keep = (owner[:-1] >= 0) & (length > 0)
    begin, owner = moment[:-1][keep], owner[:-1][keep]
    return {
        "name": name[owner],
        "t0_ns": begin,
        "dur_ns": length[keep],
        "stream": np.full(len(begin), thread, np.int64),
        "thread": np.full(len(begin), thread, np.int64),
    }


def _joined(
    profile: Profile,
    meta: Mapping[str, Any],
    host: Host | None,
    kernels: Columns,
    calls: Columns,
    syncs: Columns,
    notes: list[str],
) -> tuple[int, int]:
    """Give kernels and waits their point and cycle, in place, and tell which cycles the window holds whole."""
    call = kernels.pop("call", None)
    thread = kernels.pop("thread", None)
    count = len(kernels["t0_ns"])
    if host is None:
        notes.append("the process's ring is not there: kernels belong to no point and no cycle")
        return 0, -1
    if host.lost:
        notes.append("the ring no longer holds the whole window: its earliest cycles have no points")
    seen = kernels["launch_ns"] >= 0
    if thread is None:
        thread = np.full(count, -1, np.int64)
        if call is not None and bool(seen.any()):
            thread[seen] = calls["thread"][call[seen]]
    kernels["point"], kernels["cycle"] = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    kernels["point"][seen], said = host.points_of(thread[seen], kernels["launch_ns"][seen])
    kernels["cycle"][seen] = host.cycles_of(kernels["launch_ns"][seen])
    syncs["point"], more = host.points_of(syncs["thread"], syncs["t0_ns"])
    syncs["cycle"] = host.cycles_of(syncs["t0_ns"])
    notes += dict.fromkeys([*said, *more])
    return _whole_cycles(profile, meta, host, kernels, calls, notes)


def _whole_cycles(
    profile: Profile, meta: Mapping[str, Any], host: Host, kernels: Columns, calls: Columns, notes: list[str]
) -> tuple[int, int]:
    """The first and last cycle that lie inside with all that they launched; at most as many as were asked for."""
    numbers, _length = host.inside(meta["begin_ns"], meta["end_ns"])
    if meta["activity"] != "cpu" and len(numbers):
        launch = profile.holding(calls, *_LAUNCHES)
        missing = launch & ~np.isin(calls["correlation"], kernels["correlation"])
        cut = host.cycles_of(calls["t0_ns"][missing])
        lost = np.isin(numbers, cut)
        # A device that runs behind was still at work on the last cycles when the window ended.
        behind = numbers >= int(kernels["cycle"].max(initial=-1))
        numbers, lost = numbers[~behind], lost[~behind]
        if bool(lost.any()):
            kept = _longest(~lost)
            notes.append(f"{int(lost.sum())} of {len(numbers)} cycles lack kernels that they launched: left out")
            numbers = numbers[kept]
    if not len(numbers):
        notes.append("no cycle lies wholly inside the window")
        return 0, -1
    numbers = numbers[: meta["cycles"]]
    return int(numbers[0]), int(numbers[-1])


def _longest(good: NDArray[np.bool_]) -> slice:
    """The longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return slice(0, 0)
    at = int(np.argmax(ends - begins))
    return slice(int(begins[at]), int(ends[at]))


def _used(names: tuple[str, ...], index: NDArray[Any]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The names that are used, and the index in them."""
    used, place = np.unique(index, return_inverse=True)
    return tuple(names[at] for at in used.tolist()), place.astype(np.int64)


def _named_syncs(syncs: Columns) -> dict[str, Any]:
    wanted = ("t0_ns", "dur_ns", "name", "thread", "cycle", "point")
    return {name: syncs[name] for name in wanted if name in syncs}


def _rank(meta: Mapping[str, Any], trace: Trace | None) -> int:
    """As the process itself knew it, or the recording."""
    if meta["rank"] >= 0 or trace is None:
        return int(meta["rank"])
    ranks = [rank.rank for rank in trace.ranks if meta["pid"] in {rank.pid, *(part.pid for part in rank.spans)}]
    return ranks[0] if ranks else -1
