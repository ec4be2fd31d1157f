"""The profiler's clock joined to the probes': by calls that both have timed, with a bound on the error.

While the window is on, the runtime makes calls that the profiler records, and reads perf_counter before and after each.
The recorded call lies inside, so each bounds the offset from both sides; all of them together leave a few hundred
nanoseconds. Kernels are on the device's clock, which the driver maps to the host's: they cannot begin before the call
that launched them, nor end after a call that waited for them, and that bounds what is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.deep_profile import Profile
from specmeter.trace.deep_window import Columns

_FAR_NS = 5_000_000
_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Clock:
    """Maps ns of the profiler to ns of perf_counter, by a line through two moments. ``error_ns`` bounds its error.

    ``note`` is empty, or says why the bound is a poor one.
    """

    at_ns: tuple[int, int]
    offset_ns: tuple[int, int]
    error_ns: int
    note: str = ""

    def to_host(self, time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same moments on the host's clock."""
        length = self.at_ns[1] - self.at_ns[0]
        if self.offset_ns[0] == self.offset_ns[1] or length <= 0:
            return time_ns + self.offset_ns[0]
        slope = (self.offset_ns[1] - self.offset_ns[0]) / length
        moved = np.rint((time_ns - self.at_ns[0]) * slope).astype(np.int64)
        shifted: NDArray[np.int64] = time_ns + self.offset_ns[0] + moved
        return shifted


def fit_clock(profile: Profile, meta: Mapping[str, Any]) -> Clock:
    """From the marks of a window's beginning and end; from pairs of clock readings where the marks are missing."""
    rough = [_of_pairs(meta.get(f"{when}_pairs") or []) for when in ("start", "stop")]
    known = [pair for pair in rough if pair is not None]
    if not known:
        return Clock((0, 0), (0, 0), 1 << 62, "the window does not say how its clock stands to the probes'")
    brackets = [np.asarray(meta.get(f"{when}_marks") or [], np.int64).reshape(-1, 2) for when in ("start", "stop")]
    bounds = _of_marks(profile, meta, brackets, known[0][1])
    found = [bound for bound in bounds if bound is not None]
    if not found:
        spread = max(pair[1] for pair in known) - min(pair[1] for pair in known)
        error = max(pair[2] for pair in known) + spread
        note = "the window's clock comes from the calendar: its own marks are not in it"
        return Clock((0, 0), (known[0][1], known[0][1]), error + 100_000, note)
    return _line(found)


def shift_bounds(kernels: Columns, calls: Columns, blocking: NDArray[np.bool_]) -> tuple[int | None, int | None]:
    """How far the kernels' times must and may be moved later, ns: (at least, at most), None where nothing bounds it.

    ``kernels`` with ``launch_ns``; ``calls`` are host calls with ``correlation``, those under ``blocking`` returned
    after what they launched had ended; all on one clock.
    """
    seen = kernels["launch_ns"] >= 0
    least = int((kernels["launch_ns"] - kernels["t0_ns"])[seen].max()) if bool(seen.any()) else None
    most = None
    if bool(blocking.any()):
        ends = dict(
            zip(
                calls["correlation"][blocking].tolist(),
                (calls["t0_ns"] + calls["dur_ns"])[blocking].tolist(),
                strict=True,
            )
        )
        waited = np.isin(kernels["correlation"], list(ends))
        if bool(waited.any()):
            end = np.array([ends[number] for number in kernels["correlation"][waited].tolist()])
            most = int((end - (kernels["t0_ns"] + kernels["dur_ns"])[waited]).min())
    return least, most


def _of_pairs(pairs: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """(calendar, offset, error) of the tightest reading."""
    if not pairs:
        return None
    before, unix, after = min(pairs, key=lambda pair: pair[2] - pair[0])
    middle = (before + after) // 2
    return int(unix), int(middle - unix), int(after - before + 1) // 2


def _of_marks(
    profile: Profile, meta: Mapping[str, Any], brackets: Sequence[NDArray[np.int64]], rough: int
) -> list[tuple[int, int, int] | None]:
    """(moment, least, greatest offset) from the marks of each end of the window; None where they are not all there."""
    table = profile.operators if meta.get("activity") == "cpu" else profile.host
    ours = profile.named(table, str(meta.get("mark_name"))) & of_thread(
        table["thread"], int(meta.get("thread", -1)), int(meta.get("native_thread", -1))
    )
    t0 = table["t0_ns"][ours]
    t1 = t0 + table["dur_ns"][ours]
    found: list[tuple[int, int, int] | None] = []
    for bracket, first in zip(brackets, (True, False), strict=True):
        # Nobody else makes such calls in that thread: the first ones are of the begin, the last ones of the end.
        own = slice(0, len(bracket)) if first else slice(len(t0) - len(bracket), len(t0))
        begin, end = t0[own], t1[own]
        fits = len(bracket) > 0 and len(begin) == len(bracket)
        if not fits or bool((np.abs(begin + rough - bracket[:, 0]) > _FAR_NS).any()):
            found.append(None)
        else:
            least, greatest = int((bracket[:, 0] - begin).max()), int((bracket[:, 1] - end).min())
            found.append((int(begin[0]), least, greatest))
    return found


def _line(found: Sequence[tuple[int, int, int]]) -> Clock:
    least, greatest = max(bound[1] for bound in found), min(bound[2] for bound in found)
    at = (found[0][0], found[-1][0])
    if least <= greatest:
        middle = (least + greatest) // 2
        return Clock(at, (middle, middle), (greatest - least + 1) // 2)
    # One offset does not do: the clocks have drifted, or a bound is off by its rounding.
    middles = [(bound[1] + bound[2]) // 2 for bound in found]
    error = max(abs(bound[2] - bound[1] + 1) // 2 for bound in found)
    return Clock(at, (middles[0], middles[-1]), error)


def of_thread(threads: NDArray[np.int64], ident: int, native: int) -> NDArray[np.bool_]:
    """Which recorded ids are that thread: the system's id, or the lower 32 bits of the pthread's.

    CUPTI records those bits of a thread that torch has not met; libkineto takes them as a signed number and writes its
    absolute value.
    """
    low = ident & _LOW_32
    found: NDArray[np.bool_] = (threads == native) | ((threads & _LOW_32) == low)
    if low >= 1 << 31:
        found |= threads == (1 << 32) - low
    return found
