"""A saved run as lanes of slices on one clock: what every timeline format is written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.rank_arrivals import missing_ranks
from specmeter.analysis.rank_clock import RankClock, saved_clocks
from specmeter.errors import SpecmeterError
from specmeter.reporters.inert import inert
from specmeter.trace.device import ring_lanes
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns, shared_ranks

LANES = ("cycles", "host", "device", "collectives")
_CYCLES = ("host", "rank", "cycle", "t0_ns", "dur_ns", "kind", "dropped")
_SPANS = ("host", "pid", "rank", "cycle", "point", "clock", "t0_ns", "dur_ns", "self_ns", "inside")
_ARGS = ("kind", "batch", "steps", "drafted", "accepted", "sampled", "setting", "prompt_id", "dropped", "probed")


@dataclass(frozen=True)
class Lane:
    """Slices that nest: one thread of the host, one stream of the device, the collectives or the cycles of a rank.

    ``process`` is an index in Timeline.processes and ``kind`` one of LANES. The arrays have one entry a slice:
    ``t0_ns`` and ``dur_ns`` on the timeline's clock, ``name``, and ``args`` by the argument's name.
    """

    process: int
    kind: str
    title: str
    name: NDArray[Any]
    t0_ns: NDArray[np.int64]
    dur_ns: NDArray[np.int64]
    args: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.t0_ns)


@dataclass(frozen=True)
class Timeline:
    """One window of a run.

    ``processes`` has a title for each rank. Times are perf_counter_ns of the leading rank's machine, ``unix_offset_ns``
    added to one gives the calendar time (None: not recorded). ``begin_ns`` and ``end_ns`` bound the window, ``cycles``
    of ``cycles_total`` of the leading rank are in it. ``warnings`` are sentences for the user.
    """

    processes: tuple[str, ...]
    lanes: tuple[Lane, ...]
    begin_ns: int
    end_ns: int
    unix_offset_ns: int | None
    cycles: int
    cycles_total: int
    about: Mapping[str, Any]
    warnings: tuple[str, ...] = field(default=())

    @property
    def slices(self) -> int:
        """How many slices all lanes hold."""
        return sum(len(lane) for lane in self.lanes)


def build_timeline(run: Run, first: int = 0, last: int | None = None) -> Timeline:
    """The lanes of the cycles ``first`` to before ``last`` (None: the end), counted on the leading rank.

    Raises SpecmeterError when the run has no cycles, or none in that range.
    """
    cycles, spans = run.cycles, run.spans
    _require(run, "cycles", cycles, _CYCLES)
    _require(run, "spans", spans, _SPANS)
    keys = _ranks(cycles)
    leading = _of(cycles, keys[0])
    total = int(np.count_nonzero(leading))
    t0, dur = cycles["t0_ns"][leading], cycles["dur_ns"][leading]
    stop = total if last is None else min(last, total)
    if not 0 <= first < stop:
        raise SpecmeterError(f"The run has cycles 0 to {total - 1}; {first}:{last} holds none of them")
    window = (int(t0[first]), int(t0[stop - 1] + dur[stop - 1]))
    rings = ring_lanes(run, spans)
    clocks = saved_clocks(run.analysis)
    roles = {str(point.get("name")): str(point.get("role")) for point in run.plan.get("points", [])}
    lanes: list[Lane] = []
    for number, key in enumerate(keys):
        shift = _shift(clocks.get(key), rings.shift(key[0], keys[0][0]), window)
        lanes += _rank_lanes(number, key, cycles, spans, shift, window, roles)
        lanes += [
            Lane(number, kind, title, name, t0 + shift, dur, args)
            for kind, title, name, t0, dur, args in rings.lanes(*key, window[0] - shift, window[1] - shift)
        ]
    titles = tuple(_title(key, spans) for key in keys)
    engine = run.analysis.get("engine") or {}
    about = {
        "run": inert(run.run.get("id", ""), 200), "specmeter": inert(run.run.get("version", "")),
        "engine": inert(engine.get("name") or run.plan.get("engine") or "", 80),
    }  # fmt: skip
    missing = missing_ranks([rank for _host, rank in keys], -1)
    return Timeline(
        titles, tuple(lane for lane in lanes if len(lane)), *window, rings.unix_offset(keys[0][0]), stop - first, total,
        about, (*rings.warnings, *missing, *_shared(cycles)),
    )  # fmt: skip


def _shift(clock: RankClock | None, by_calendar: int, window: tuple[int, int]) -> int:
    """What to add to a rank's moments: by its collectives where they joined its clock, in the window's middle."""
    if clock is None:
        return by_calendar
    middle = np.array([sum(window) // 2 - clock.offset_ns])
    return int(clock.onto(middle)[0] - middle[0])


def _rank_lanes(
    number: int,
    key: tuple[str, int],
    cycles: Columns,
    spans: Columns,
    shift: int,
    window: tuple[int, int],
    roles: Mapping[str, str],
) -> list[Lane]:
    at = np.flatnonzero(_of(cycles, key) & (cycles["dur_ns"] > 0))
    at = at[_inside(cycles["t0_ns"][at] + shift, cycles["dur_ns"][at], window)]
    kind = np.array([f"cycle ({inert(k)})" for k in cycles["kind"][at]], dtype=object)
    args = {"cycle": cycles["cycle"][at]} | {name: cycles[name][at] for name in _ARGS if name in cycles}
    lanes = [Lane(number, "cycles", "cycles", kind, cycles["t0_ns"][at] + shift, cycles["dur_ns"][at], args)]
    mine = _of(spans, key)
    for clock in ("host", "device"):
        rows = np.flatnonzero(mine & (spans["clock"] == clock))
        for thread, piece in enumerate(_threads(rows, spans)):
            keep = piece[_inside(spans["t0_ns"][piece] + shift, spans["dur_ns"][piece], window)]
            lanes.append(_span_lane(number, clock, thread, keep, spans, shift, roles))
    return lanes


def _span_lane(
    number: int,
    clock: str,
    thread: int,
    at: NDArray[np.int64],
    spans: Columns,
    shift: int,
    roles: Mapping[str, str],
) -> Lane:
    args: dict[str, NDArray[Any]] = {
        name: spans[name][at] for name in ("cycle", "step", "self_ns", "inside") if name in spans
    }
    args["role"] = np.array([roles.get(str(name), "unknown") for name in spans["point"][at]], dtype=object)
    pid = int(spans["pid"][at[0]]) if len(at) else 0
    title = f"{clock}: process {pid}, {'thread' if clock == 'host' else 'stream'} {thread + 1}"
    return Lane(number, clock, title, spans["point"][at], spans["t0_ns"][at] + shift, spans["dur_ns"][at], args)


def _threads(rows: NDArray[np.int64], spans: Columns) -> list[NDArray[np.int64]]:
    """The rows of each thread: within one they are in order of their ends, so an earlier end begins the next one."""
    if not len(rows):
        return []
    end, pid = spans["t0_ns"][rows] + spans["dur_ns"][rows], spans["pid"][rows]
    begins = np.flatnonzero((end[1:] < end[:-1]) | (pid[1:] != pid[:-1])) + 1
    return np.split(rows, begins)


def _inside(t0: NDArray[np.int64], dur: NDArray[np.int64], window: tuple[int, int]) -> NDArray[np.bool_]:
    """Slices that lie in the window as a whole: those that only reach into it belong to no exported cycle."""
    inside: NDArray[np.bool_] = (t0 >= window[0]) & (t0 + dur <= window[1])
    return inside


def _ranks(cycles: Columns) -> list[tuple[str, int]]:
    """(host, rank) of every rank, in the order of the table: the leading one first."""
    pairs = dict.fromkeys(zip(cycles["host"].tolist(), cycles["rank"].tolist(), strict=True))
    return [(str(host), int(rank)) for host, rank in pairs]


def _of(table: Columns, key: tuple[str, int]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (table["host"] == key[0]) & (table["rank"] == key[1])
    return found


def _shared(cycles: Columns) -> list[str]:
    return [
        f"several processes on {inert(host, 60)} are recorded as {f'rank {rank}' if rank >= 0 else 'one server'}, and "
        "share its lanes: an earlier version did not tell them apart; record again"
        for host, rank in shared_ranks(cycles)
    ]


def _title(key: tuple[str, int], spans: Columns) -> str:
    pids = ", ".join(str(pid) for pid in np.unique(spans["pid"][_of(spans, key)]).tolist())
    who = f"rank {key[1]}" if key[1] >= 0 else "server"
    return f"{who} on {inert(key[0], 60)} (process {pids})" if pids else f"{who} on {inert(key[0], 60)}"


def _require(run: Run, name: str, table: Columns, columns: tuple[str, ...]) -> None:
    if not table or not len(next(iter(table.values()))):
        arms = ", ".join(inert(child, 40) for child in sorted(p.name for p in _child_folders(run)))
        raise SpecmeterError(
            f"{run.path} holds no {name}",
            f"Its run is {inert(run.run.get('status', 'of unknown state'))}."
            + (f" It has children: {arms}." if arms else ""),
            f"Name one of {run.path / 'children'}." if arms else "Record again; `specmeter status` shows what was hit.",
        )
    absent = [column for column in columns if column not in table]
    if absent:
        raise SpecmeterError(
            f"The table {name} of {run.path} lacks {', '.join(absent)}",
            "It was changed, or written by another version.",
            "Export from a run directory as specmeter wrote it.",
        )
    lengths = {len(column) for column in table.values()}
    if len(lengths) != 1:
        raise SpecmeterError(f"The table {name} of {run.path} is damaged", "Its columns differ in length.")


def _child_folders(run: Run) -> list[Any]:
    folder = run.path / "children"
    return [p for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
