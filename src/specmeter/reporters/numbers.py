"""Numbers as the reports print them: one way for text and page, so that both say the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specmeter.analysis.stalls import RULE
from specmeter.reporters.inert import inert

MISSING = "-"
# Student's t over few units that differ gives ends such as 0 and 1e38. More than so many times the estimate between the
# ends, whatever the number of units, is no interval to print but the want of one.
WIDEST = 20.0
NOTHING = "tells nothing"
STALLED_MUCH = 20.0
CUT = " (cut)"
_UNBOUNDED = (-math.inf, math.inf)


def accept_range(steps: int) -> tuple[float, float]:
    """The least and the most tokens a cycle of ``steps`` draft steps can yield (0 or less: the steps are not known)."""
    return 1.0, steps + 1.0 if steps > 0 else math.inf


def bounds(
    interval: Mapping[str, Any] | None, floor: float = 0.0, most: float = math.inf
) -> tuple[float, float] | None:
    """The ends of an interval, cut at ``floor`` and ``most``; None where there are none, or where they tell nothing.

    The one rule of all texts and pages. Times, rates and ratios cannot be negative, and a cycle yields what
    ``accept_range`` says, yet a symmetric interval over few noisy units may reach beyond: what is impossible is cut
    off; the interval's coverage stays the same. They tell nothing where both ends are cut at finite limits, and where
    they are more than WIDEST times the estimate apart (not with ``floor`` -inf: a difference may be near 0).
    """
    if interval is None or interval["low"] is None or interval["high"] is None:
        return None
    low, high = float(interval["low"]), float(interval["high"])
    if floor > -math.inf and high - low > WIDEST * abs(interval.get("point") or math.inf):
        return None
    if low < floor and high > most:
        return None
    return min(max(low, floor), most), max(min(high, most), floor)


def cut(interval: Mapping[str, Any], floor: float = 0.0, most: float = math.inf) -> str:
    """``CUT`` where ``bounds`` gives another end than the analysis did, else nothing."""
    ends = bounds(interval, floor, most)
    return CUT if ends and ends != bounds(interval, *_UNBOUNDED) else ""


def plus_minus(interval: Mapping[str, Any], digits: int = 3, floor: float = 0.0, most: float = math.inf) -> str:
    """`` [low, high]``, marked where an end was cut, or a note that there is no interval; see ``bounds``."""
    ends = bounds(interval, floor, most)
    if ends is None:
        return f" ({no_interval(interval)})"
    return f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]{cut(interval, floor, most)}"


def no_interval(interval: Mapping[str, Any]) -> str:
    """``no interval that tells anything: 2 prompts``, for an interval that ``bounds`` has no ends for."""
    count, unit = interval.get("n"), str(interval.get("unit") or "unit")
    return "no interval that tells anything" + ("" if count is None else f": {units(int(count), unit)}")


def span(
    interval: Mapping[str, Any] | None, digits: int = 3, floor: float = 0.0, most: float = math.inf, mark: bool = True
) -> str:
    """``low-high``, marked where an end was cut; NOTHING where the ends tell nothing, ``-`` without an estimate."""
    ends = bounds(interval, floor, most)
    if interval is None or interval["point"] is None:
        return MISSING
    if ends is None:
        return NOTHING
    return f"{ends[0]:.{digits}f}-{ends[1]:.{digits}f}{cut(interval, floor, most) if mark else ''}"


def point(interval: Mapping[str, Any] | None, digits: int = 3) -> str:
    """The estimate of an interval, or ``-``."""
    return MISSING if interval is None or interval["point"] is None else f"{interval['point']:.{digits}f}"


def number(value: float | None, digits: int = 3) -> str:
    """A plain number, or ``-``."""
    return MISSING if value is None else f"{value:.{digits}f}"


def stalled_line(found: Mapping[str, Any] | None) -> str:
    """How many cycles were left out of times as stalls of the machine, and by which rule; empty for none."""
    if not found or not found["cycles"]:
        return ""
    return (
        f"{units(found['cycles'], 'cycle')} {RULE} ({found['limit_ms']:.1f} ms) left out of the times as stalls of the "
        f"machine: {found['percent_of_time']:.1f} % of the recorded time. Rates by requests hold them."
    )


def mostly_stalled(found: Mapping[str, Any] | None) -> str:
    """``stalled_line`` where more than STALLED_MUCH percent of the time was left out: it belongs to the headline."""
    return stalled_line(found) if found and found["percent_of_time"] > STALLED_MUCH else ""


def device_line(found: Mapping[str, Any] | None) -> str:
    """How long no timed point ran on the device in a cycle, or why that was not measured.

    Empty where a deep window tells it, and for runs of older versions, which hold no reason.
    """
    if not found:
        return ""
    if not found.get("idle_ms"):
        why = found.get("reason")
        return (
            f"Seams (the device waiting): not measured, {inert(why, 160)}" if why and not found.get("windows") else ""
        )
    return (
        f"Device: {found['busy_ms']:.3f} ms a cycle in its timed points, none of them runs for "
        f"{found['idle_ms']['point']:.3f} ms{plus_minus(found['idle_ms'])}, {found['idle_percent']:.1f} % of the cycle "
        f"({units(found['cycles'], 'cycle')} with device spans). Not its idle time: work outside of timed points "
        "is in it, gaps inside of them are not (a deep window has both)"
    )


def percent(share: float | None, digits: int = 1) -> str:
    """A share (0 to 1) in percent, or ``-``."""
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def units(count: int, unit: str) -> str:
    """``1 request``, ``12 requests``, ``12 pairs of one block and prompt``."""
    if count == 1:
        return f"1 {unit}"
    head, of, rest = unit.partition(" of ")
    return f"{count} {head}s{of}{rest}"
