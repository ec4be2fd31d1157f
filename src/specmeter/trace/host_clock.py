"""How the monotonic clocks of several hosts differ, as far as the rings' headers say it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specmeter.trace.ring import RingHeader


@dataclass(frozen=True)
class HostClock:
    """One host's perf_counter: ``boot_id`` names the machine's clock, which containers on it share.

    ``unix_offset_ns`` is what to add for the calendar's time, ns; None where it was not recorded.
    """

    boot_id: str
    unix_offset_ns: int | None


def host_clocks(headers: Iterable[RingHeader]) -> dict[str, HostClock]:
    """The clock of each host that a ring was written on, by the host's name; a ring with a calendar counts first."""
    found: dict[str, HostClock] = {}
    for header in headers:
        offset = header.time_ns - header.perf_counter_ns if header.time_ns else None
        known = found.get(header.host)
        if known is None or (known.unix_offset_ns is None and offset is not None):
            found[header.host] = HostClock(header.boot_id, offset)
    return found


def same_clock(clocks: Mapping[str, HostClock], host: str, other: str) -> bool:
    """Whether two hosts' names are of one machine, whose processes share its monotonic clock."""
    mine, theirs = clocks.get(host), clocks.get(other)
    return host == other or (mine is not None and theirs is not None and mine.boot_id == theirs.boot_id != "")


def calendar_shift(clocks: Mapping[str, HostClock], host: str, to: str) -> int | None:
    """What to add to perf_counter_ns of ``host`` for that of ``to``, as their calendars say; None if not known.

    As wrong as the calendars are: NTP keeps them within milliseconds of each other, nobody keeps them without it.
    """
    if same_clock(clocks, host, to):
        return 0
    mine, theirs = clocks.get(host), clocks.get(to)
    if mine is None or theirs is None or mine.unix_offset_ns is None or theirs.unix_offset_ns is None:
        return None
    return mine.unix_offset_ns - theirs.unix_offset_ns
