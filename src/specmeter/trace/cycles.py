"""The table of cycles: when each began, what kind it is, which are left out of the averages and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specmeter.runtime import layout
from specmeter.trace.plan import CYCLE, PlanIndex
from specmeter.trace.requests import Request
from specmeter.trace.values import Values

DECODE, MIXED, AFTER_PREFILL, PREFILL = range(4)
KINDS = ("decode", "mixed", "after-prefill", "prefill")
KEPT, FIRST, LAST, ARMING, OPEN, OUTSIDE, PARTLY_PROBED, EMPTY, LOST = range(9)
MIXTURE = 2  # of code with probes and without, or not known
DROPS = (
    "",
    "first of a request",
    "last of a request, or idle after it",
    "first after arming",
    "not ended when recording stopped",
    "outside of every request",
    "probes changed during it",
    "a step without a request",
    "records of it are missing",
)
UNKNOWN = -1
_MAX_OVERLAP = 256


@dataclass(frozen=True)
class CycleTable:
    """One entry a cycle in every array, in order of time.

    ``t0_ns`` is the start and ``dur_ns`` the time to the next start (0 for the last, open one); ``own_ns`` the time
    inside the cycle's function. ``kind`` and ``drop`` index KINDS and DROPS (0: kept). ``batch`` is in requests;
    ``drafted``, ``accepted`` (drafts, bonus excluded) and ``sampled`` (bonus included) are tokens over the whole batch;
    -1 means not known. ``request`` is the index of a request that ran then; ``probed`` is 1 where the probes were in,
    0 where the original code ran, and ``drawn`` says that this was drawn at random. ``accept`` has one row a verified
    sequence: cycle, accepted, drafted. ``missed_rank`` is the place, in the draft's own order, of the token that the
    target had where the drafts failed first (0: not in the draft's vocabulary), -1 where nothing failed or told.
    """

    t0_ns: NDArray[np.int64]
    dur_ns: NDArray[np.int64]
    own_ns: NDArray[np.int64]
    kind: NDArray[np.uint8]
    drop: NDArray[np.uint8]
    batch: NDArray[np.int32]
    steps: NDArray[np.int32]
    drafted: NDArray[np.int32]
    accepted: NDArray[np.int32]
    sampled: NDArray[np.int32]
    request: NDArray[np.int32]
    probed: NDArray[np.uint8]
    drawn: NDArray[np.bool_]
    accept: NDArray[np.int32]
    missed_rank: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.t0_ns)


@dataclass(frozen=True)
class CycleSources:
    """What the table is made from: cycle spans in order of time, values, and spans of points that mark prefill.

    ``marks`` holds (time, state) of the changes of sampling: 1 probes in, 0 out, 2 a mixture, 3 in without a draw from
    here on; ``worker_marks`` those of the process that works for this one, which draws for itself. ``lost`` holds
    (from, to) of stretches of time of which records are missing.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    values: Values
    prefill: NDArray[np.int64]
    marks: NDArray[np.int64]
    worker_marks: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    lost: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))


def build_cycles(sources: CycleSources, index: PlanIndex, requests: Sequence[Request]) -> CycleTable:
    """Make the cycle table of one process."""
    starts, count = sources.starts, len(sources.starts)
    dur = np.zeros(count, np.int64)
    dur[:-1] = np.diff(starts)
    values = sources.values
    batch = _per_cycle(values, "batch", starts, "first")
    late = _late_readings(values, index, starts)
    drafted = _per_cycle(values, "drafted", starts, "sum")
    accepted = _per_cycle(values, "accepted", starts, "sum", late)
    sampled = _per_cycle(values, "sampled", starts, "sum", late)
    accept = _accept_rows(values, starts, late)
    batch = np.where((batch == UNKNOWN) & (accepted != UNKNOWN), np.bincount(accept[:, 0], minlength=count), batch)
    sampled = np.where((sampled == UNKNOWN) & (accepted != UNKNOWN), accepted + np.maximum(batch, 1), sampled)
    accepted = np.where((accepted == UNKNOWN) & (sampled != UNKNOWN), sampled - np.maximum(batch, 1), accepted)
    steps = _per_cycle(values, "steps", starts, "first")
    steps = np.where((steps == UNKNOWN) & (drafted != UNKNOWN), drafted // np.maximum(batch, 1), steps)
    inside, after = _prefill(sources, starts)
    kind = _kinds(values, index, starts, batch, drafted, inside, after)
    request = _running(starts, requests)
    probed, drawn = _probed(sources, starts)
    drop = _drops(sources, dur, after, requests, request)
    drop[(drop == KEPT) & (probed == MIXTURE)] = PARTLY_PROBED
    # vLLM runs one more step after the last request ended, to tell the workers; a request sent meanwhile hides that.
    drop[(drop == KEPT) & (batch == 0)] = EMPTY
    return CycleTable(
        starts, dur, sources.ends - starts, kind, drop, batch.astype(np.int32), steps.astype(np.int32),
        drafted.astype(np.int32), accepted.astype(np.int32), sampled.astype(np.int32), request, probed, drawn, accept,
        _per_cycle(values, "missed_rank", starts, "first").astype(np.int32),
    )  # fmt: skip


def cycle_at(starts: NDArray[np.int64], time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The cycle that each time falls in; -1 before the first."""
    return np.searchsorted(starts, time_ns, side="right") - 1


def _late_readings(values: Values, index: PlanIndex, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each value the cycle it was made in, where the engine's own iteration number tells; else that of its reading.

    Under overlap scheduling the results of one iteration are read while the next one runs. A recipe reads the number in
    the cycle's point, and again where results are read: in the same point, or in one around it, whose value follows in
    the same cycle. A number that no recorded cycle has leaves the value where it was read.
    """
    cycle = cycle_at(starts, values.time_ns)
    at = values.pick("iteration")
    roles = np.array(index.roles)
    own = roles[values.owner[at]] == CYCLE if len(at) else np.zeros(0, bool)
    numbered, read = at[own & (cycle[at] >= 0)], at[~own]
    if not len(numbered) or not len(read):
        return cycle
    numbers, first = np.unique(values.number[numbered], return_index=True)
    rows = cycle[numbered][first]
    read = read[np.argsort(values.time_ns[read], kind="stable")]
    following = np.minimum(np.searchsorted(values.time_ns[read], values.time_ns), len(read) - 1)
    told = read[following]
    same = (values.time_ns[told] >= values.time_ns) & (cycle[told] == cycle)
    place = np.minimum(np.searchsorted(numbers, values.number[told]), len(numbers) - 1)
    return np.where(same & (numbers[place] == values.number[told]), rows[place], cycle)


def _per_cycle(
    values: Values, name: str, starts: NDArray[np.int64], how: str, cycles: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """One number a cycle from the values called ``name``: their sum, or the first; -1 where there is none.

    ``cycles`` says which cycle each value belongs to, by default that of its reading.
    """
    out = np.full(len(starts), UNKNOWN, np.int64)
    at = values.pick(name)
    cycle = cycle_at(starts, values.time_ns[at]) if cycles is None else cycles[at]
    at, cycle = at[cycle >= 0], cycle[cycle >= 0]
    if not len(at):
        return out
    if how == "sum":
        present = np.bincount(cycle, minlength=len(starts)) > 0
        total = np.bincount(cycle, weights=values.number[at], minlength=len(starts))
        out[present] = total[present].astype(np.int64)
    else:
        where, first = np.unique(cycle, return_index=True)
        out[where] = values.number[at[first]]
    return out


def _accept_rows(values: Values, starts: NDArray[np.int64], late: NDArray[np.int64]) -> NDArray[np.int32]:
    at = values.pick("accepted")
    cycle = late[at]
    at, cycle = at[cycle >= 0], cycle[cycle >= 0]
    rows = np.full((len(at), 3), UNKNOWN, np.int32)
    rows[:, 0], rows[:, 1] = cycle, values.number[at]
    drafted = values.pick("drafted")
    of = cycle_at(starts, values.time_ns[drafted])
    drafted = drafted[of >= 0]
    # Both come from the same call or list, so the n-th accepted count belongs to the n-th drafted one.
    if len(drafted) == len(at):
        rows[:, 2] = values.number[drafted]
    return rows


def _prefill(sources: CycleSources, starts: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which cycles hold prefill inside their function, and which are followed by prefill before the next one."""
    inside, after = np.zeros(len(starts), bool), np.zeros(len(starts), bool)
    cycle = cycle_at(starts, sources.prefill)
    time, cycle = sources.prefill[cycle >= 0], cycle[cycle >= 0]
    within = time < sources.ends[cycle]
    inside[cycle[within]] = True
    after[cycle[~within]] = True
    return inside, after


def _kinds(
    values: Values,
    index: PlanIndex,
    starts: NDArray[np.int64],
    batch: NDArray[np.int64],
    drafted: NDArray[np.int64],
    inside: NDArray[np.bool_],
    after: NDArray[np.bool_],
) -> NDArray[np.uint8]:
    tokens = _per_cycle(values, "tokens", starts, "first")
    known = (tokens != UNKNOWN) & (batch != UNKNOWN)
    # A decode-only step runs one token a request and its drafts; whatever is more belongs to a prompt.
    holds = inside | (known & (tokens > batch + np.maximum(drafted, 0)))
    kind = np.where(holds, np.where((drafted > 0) | (batch > 1), MIXED, PREFILL), DECODE).astype(np.uint8)
    mode = _per_cycle(values, "mode", starts, "first")
    for number, code in index.modes.items():
        kind[mode == number] = (DECODE, PREFILL, MIXED)[code]
    previous = np.zeros(len(starts), bool)
    previous[1:] = (kind[:-1] != DECODE) | after[:-1]
    kind[(kind == DECODE) & previous] = AFTER_PREFILL
    return kind


def _running(starts: NDArray[np.int64], requests: Sequence[Request]) -> NDArray[np.int32]:
    """The request sent last among those that ran when each cycle began; -1: none."""
    found = np.full(len(starts), UNKNOWN, np.int32)
    if not requests:
        return found
    send = np.array([r.send_ns for r in requests])
    order = np.argsort(send, kind="stable")
    send, end = send[order], np.array([r.end_ns for r in requests])[order]
    at = np.searchsorted(send, starts, side="right") - 1
    for _ in range(min(_MAX_OVERLAP, len(requests))):
        open_ = (found == UNKNOWN) & (at >= 0)
        hit = open_ & (end[at] >= starts)
        found[hit] = order[at[hit]]
        at = at - 1
    return found


def _probed(sources: CycleSources, starts: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """The state of the probes in each cycle, and whether it was drawn; processes that differ make a mixture."""
    probed = np.ones(len(starts), np.uint8)
    drawn = np.zeros(len(starts), bool)
    if len(sources.marks):
        at = np.searchsorted(sources.marks[:, 0], starts, side="right") - 1
        state = np.where(at >= 0, sources.marks[at, 1], layout.SAMPLING_ALL)
        drawn = state != layout.SAMPLING_ALL
        probed[drawn] = state[drawn]
    if len(sources.worker_marks):
        # A worker draws inside the cycle, so what holds is its last mark before the next one begins.
        at = (
            np.searchsorted(sources.worker_marks[:, 0], np.append(starts[1:], np.iinfo(np.int64).max)) - 1
        )  # -1: in, as armed
        theirs = np.where(at >= 0, sources.worker_marks[at, 1], 1)
        theirs[theirs == layout.SAMPLING_ALL] = 1
        probed[theirs != probed] = MIXTURE
    return probed, drawn


def _drops(
    sources: CycleSources,
    dur: NDArray[np.int64],
    after: NDArray[np.bool_],
    requests: Sequence[Request],
    request: NDArray[np.int32],
) -> NDArray[np.uint8]:
    starts, count = sources.starts, len(sources.starts)
    drop = np.zeros(count, np.uint8)
    last = after | _idle(sources, dur)
    first = np.zeros(count, bool)
    first[1:] = last[:-1]
    if requests:
        drop[request == UNKNOWN] = OUTSIDE
        ended = cycle_at(starts, np.array([r.end_ns for r in requests]))
        last[ended[ended >= 0]] = True
        sent = np.searchsorted(starts, np.array([r.send_ns for r in requests]), side="left")
        first[sent[sent < count]] = True
    drop[first] = FIRST
    drop[last] = LAST
    # What seems to be one long cycle may be all of those whose records are gone.
    for begin, end in cycle_at(starts, sources.lost).tolist():
        drop[max(begin, 0) : end + 1] = LOST
    if count:
        drop[0] = ARMING
        drop[-1] = OPEN
    return drop


def _idle(sources: CycleSources, dur: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Cycles after whose function the engine waited for work: a gap far beyond the usual one and the usual cycle."""
    idle = np.zeros(len(dur), bool)
    if len(dur) > 2:
        gap = dur[:-1] - (sources.ends - sources.starts)[:-1]
        idle[:-1] = gap > max(20.0 * float(np.median(gap)), float(np.median(dur[:-1])))
    return idle
