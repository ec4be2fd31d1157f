"""What only the rings of a run hold: device spans, collectives, and each machine's clock against the calendar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.runtime import layout
from specmeter.trace.device_clock import device_clock
from specmeter.trace.device_clock import device_offset_ns as device_offset_ns
from specmeter.trace.host_clock import HostClock, calendar_shift, host_clocks
from specmeter.trace.plan import PlanIndex, index_plan
from specmeter.trace.ring import Records, Ring, read_ring
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns

RawLane = tuple[str, str, NDArray[Any], NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class RingLanes:
    """The rings of a run and how the clocks of their machines differ."""

    rings: tuple[tuple[Ring, int], ...]
    index: PlanIndex | None
    device_in_tables: bool
    warnings: tuple[str, ...] = field(default=())

    @property
    def clocks(self) -> dict[str, HostClock]:
        """The clock of each host."""
        return host_clocks(ring.header for ring, _rank in self.rings)

    def unix_offset(self, host: str) -> int | None:
        """What to add to perf_counter_ns of ``host`` for the calendar's time, ns; None where it was not recorded."""
        clock = self.clocks.get(host)
        return clock.unix_offset_ns if clock is not None else None

    def shift(self, host: str, to: str) -> int:
        """What to add to perf_counter_ns of ``host`` to get that of the machine ``to``; 0 if not known."""
        return calendar_shift(self.clocks, host, to) or 0

    def lanes(self, host: str, rank: int, begin_ns: int, end_ns: int) -> Iterator[RawLane]:
        """Lanes of one rank between two times of its own clock: kind, title, name, t0_ns, dur_ns, args."""
        for ring, of_rank in self.rings:
            if self.index is None or ring.header.host != host or of_rank != rank:
                continue
            if not self.device_in_tables:
                yield from self._device(ring, begin_ns, end_ns)
            yield from self._collectives(ring, begin_ns, end_ns)

    def _device(self, ring: Ring, begin_ns: int, end_ns: int) -> Iterator[RawLane]:
        records = ring.records[ring.records["kind"] == layout.KIND_DEVICE_SPAN]
        clock = device_clock(ring.records) if len(records) else None
        if clock is None:
            return
        t0, dur = clock.to_host(records["t0"]), records["t1"] - records["t0"]
        keep = (t0 >= begin_ns) & (t0 + dur <= end_ns) & (dur >= 0)
        yield (
            "device", f"device: process {ring.header.pid} ({clock.how})",
            self._names(records[keep]), t0[keep], dur[keep], {},
        )  # fmt: skip

    def _collectives(self, ring: Ring, begin_ns: int, end_ns: int) -> Iterator[RawLane]:
        records = ring.records[ring.records["kind"] == layout.KIND_COLLECTIVE]
        t0, dur = records["t0"], records["t1"] - records["t0"]
        keep = (t0 >= begin_ns) & (t0 + dur <= end_ns) & (dur >= 0)
        if keep.any():
            size = {"bytes": records["value"][keep].astype(np.int64)}
            title = f"collectives: process {ring.header.pid}"
            yield "collectives", title, self._names(records[keep]), t0[keep], dur[keep], size

    def _names(self, records: Records) -> NDArray[Any]:
        assert self.index is not None
        names = np.array([*self.index.names, "unknown point"], dtype=object)
        found: NDArray[Any] = names[self.index.name_of[records["point"]]]
        return found


def ring_lanes(run: Run, spans: Columns) -> RingLanes:
    """Read the rings that a run with these ``spans`` saved. A damaged one is left out, with a warning."""
    warnings, found = [], []
    for path in sorted((run.path / "rings").glob("*.ring")):
        try:
            ring = read_ring(path)
        except SpecmeterError as error:
            warnings.append(f"{path.name} was left out: {error.why or error.what}")
            continue
        of = (spans["pid"] == ring.header.pid) & (spans["host"] == ring.header.host)
        rank = int(spans["rank"][of][0]) if bool(of.any()) else ring.header.rank
        found.append((ring, rank))
    index = index_plan(run.plan) if run.plan else None
    return RingLanes(tuple(found), index, bool((spans["clock"] == "device").any()), tuple(warnings))


def device_rings(folder: Path) -> list[Ring]:
    """The rings of a run directory that hold device spans; damaged ones are left out."""
    found = []
    for path in sorted((folder / "rings").glob("*.ring")):
        with suppress(SpecmeterError):
            ring = read_ring(path)
            if bool((ring.records["kind"] == layout.KIND_DEVICE_SPAN).any()):
                found.append(ring)
    return found


def device_times(ring: Ring) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Begins and ends of a ring's device spans on its host's clock, ns, in order of begin; None without any."""
    spans = ring.records[ring.records["kind"] == layout.KIND_DEVICE_SPAN]
    clock = device_clock(ring.records) if len(spans) else None
    if clock is None:
        return None
    order = np.argsort(spans["t0"], kind="stable")
    return clock.to_host(spans["t0"][order]), clock.to_host(spans["t1"][order])
