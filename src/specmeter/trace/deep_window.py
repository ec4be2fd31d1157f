"""One process's window under the profiler as columns: its kernels, copies and waits on the host's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.trace.requests import Request

Columns = dict[str, NDArray[Any]]

KERNEL, MEMCPY, MEMSET = 0, 1, 2

KERNEL_COLUMNS: Mapping[str, str] = {
    "name": "i4",
    "kind": "i1",
    "stream": "i8",
    "t0_ns": "i8",
    "dur_ns": "i8",
    "launch_ns": "i8",
    "launch_dur_ns": "i8",
    "graph_launch": "?",
    "graph": "i8",
    "bytes": "i8",
    "cycle": "i8",
    "point": "i4",
}
SYNC_COLUMNS: Mapping[str, str] = {
    "t0_ns": "i8",
    "dur_ns": "i8",
    "name": "i4",
    "thread": "i8",
    "cycle": "i8",
    "point": "i4",
}
# What a column holds where its maker does not know better.
_UNKNOWN: Mapping[str, int] = {
    "launch_ns": -1,
    "launch_dur_ns": 0,
    "graph": -1,
    "bytes": -1,
    "cycle": -1,
    "point": -1,
    "thread": -1,
}


@dataclass(frozen=True)
class DeepWindow:
    """One process's window under the profiler. All times are ns of that host's perf_counter.

    ``device`` is the card's name. ``cycles`` are the first and last cycle, as in the process's ring, that lie wholly
    inside ``begin_ns``..``end_ns``; (0, -1) where there is none. ``names`` are the kernels' names.

    ``kernels`` has one entry a kernel, copy or fill, ordered by ``t0_ns``: ``name`` (an index in ``names``), ``kind``
    (KERNEL, MEMCPY or MEMSET), ``stream``, ``t0_ns``, ``dur_ns``, ``launch_ns`` and ``launch_dur_ns`` (the host's call
    that launched it; -1 and 0: not seen), ``graph_launch`` (that call replayed a graph), ``graph`` (one number for all
    kernels of a replay, -1: none), ``bytes`` (of copies, and of collectives that tell; -1), ``cycle`` (as in the ring,
    of the launch; -1: none) and ``point`` (plan id of the innermost point around the launch; -1: none).
    ``syncs`` has the host's calls that wait for the device, ordered by ``t0_ns``: ``t0_ns``, ``dur_ns``, ``name`` (an
    index in ``sync_names``), ``thread`` (the system's id), ``cycle`` and ``point`` as above.

    ``cost`` says what the window did to the cycle (``trace.deep_cost``). ``clock_error_ns`` bounds how far the
    profiler's times may be off the probes', after fitting. ``on_cpu``: there was no device, and the entries are
    operators on the host, with the thread as their stream and the time outside of operators that they call as theirs.
    ``requests`` are those that ran meanwhile, where a run keeps them: they tell the context's length.
    ``notes`` are sentences that a report has to show, ``setting`` is that of the requests that ran (``baseline``: plain
    decoding), empty where it is the server's own.
    """

    pid: int
    host: str
    rank: int
    device: str
    begin_ns: int
    end_ns: int
    cycles: tuple[int, int]
    names: tuple[str, ...]
    kernels: Columns
    syncs: Columns
    sync_names: tuple[str, ...]
    cost: dict[str, Any] = field(default_factory=dict)
    clock_error_ns: int = 0
    on_cpu: bool = False
    notes: tuple[str, ...] = ()
    setting: str = ""
    requests: tuple[Request, ...] = ()

    def __post_init__(self) -> None:
        _check(self.kernels, KERNEL_COLUMNS, len(self.names), "kernels")
        _check(self.syncs, SYNC_COLUMNS, len(self.sync_names), "syncs")

    @property
    def cycle_count(self) -> int:
        """How many cycles lie wholly inside."""
        return max(0, self.cycles[1] - self.cycles[0] + 1)

    def inside(self) -> NDArray[np.bool_]:
        """Which kernels were launched by cycles that lie wholly inside."""
        cycle = self.kernels["cycle"]
        found: NDArray[np.bool_] = (cycle >= self.cycles[0]) & (cycle <= self.cycles[1])
        return found


def columns(wanted: Mapping[str, str], order: bool = True, **given: Any) -> Columns:
    """Columns of the ``wanted`` names and types from arrays or lists of one length, those that are left out unknown.

    Ordered by ``t0_ns`` unless ``order`` is false.
    """
    count = len(given["t0_ns"])
    out: Columns = {}
    for name, kind in wanted.items():
        values = given.get(name)
        if values is None:
            out[name] = np.full(count, _UNKNOWN.get(name, 0), np.dtype(kind))
        else:
            out[name] = np.broadcast_to(np.asarray(values, np.dtype(kind)), (count,)).copy()
    if order:
        at = np.argsort(out["t0_ns"], kind="stable")
        out = {name: column[at] for name, column in out.items()}
    return out


def kernel_columns(**given: Any) -> Columns:
    """Kernels from arrays; ``t0_ns`` and ``name`` must be given."""
    return columns(KERNEL_COLUMNS, **given)


def sync_columns(**given: Any) -> Columns:
    """Waits from arrays; without any, empty ones."""
    return columns(SYNC_COLUMNS, **(given or {"t0_ns": []}))


def select(table: Columns, keep: NDArray[Any] | slice | Sequence[int]) -> Columns:
    """The same columns at some positions."""
    return {name: column[keep] for name, column in table.items()}


def _check(table: Columns, wanted: Mapping[str, str], names: int, what: str) -> None:
    """Raises SpecmeterError for columns that no window has: a reader must not meet them."""
    lengths = {len(column) for column in table.values()}
    missing = [name for name in wanted if name not in table and name not in _UNKNOWN]
    fault = ""
    if missing:
        fault = f"{what} lack {', '.join(missing)}"
    elif len(lengths) > 1:
        fault = f"the columns of {what} differ in length"
    elif lengths and lengths != {0}:
        name = table["name"]
        if int(name.min()) < 0 or int(name.max()) >= names:
            fault = f"{what} have a name out of 0..{names - 1}"
        elif int(table["dur_ns"].min()) < 0:
            fault = f"{what} have a negative duration"
        elif bool(np.any(np.diff(table["t0_ns"]) < 0)):
            fault = f"{what} are not in the order of their begin"
    if fault:
        raise SpecmeterError("A deep window is malformed", f"{fault[:1].upper()}{fault[1:]}.", "Record it again.")
