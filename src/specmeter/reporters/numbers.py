"""Numbers as the reports print them: one way for text and page, so that both say the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specmeter.analysis.stalls import RULE

MISSING = "-"
# Student's t over so few units gives ends such as 0 and 1e38 where they differ: that is no interval but their want.
FEW_UNITS, WIDEST = 4, 20.0


def bounds(interval: Mapping[str, Any] | None, floor: float = 0.0) -> tuple[float, float] | None:
    """The ends of an interval, the lower one cut at ``floor``; None where there are none, or where they say nothing.

    They say nothing where at most FEW_UNITS units put them more than WIDEST times the estimate apart.

    Times, rates and ratios cannot be negative, and a cycle yields one token at least, yet a symmetric interval over few
    noisy units may reach below. What is impossible is cut off; the interval's coverage stays the same.
    """
    if interval is None or interval["low"] is None or interval["high"] is None:
        return None
    wide = float(interval["high"]) - float(interval["low"]) > WIDEST * abs(interval.get("point") or math.inf)
    if wide and interval.get("n", FEW_UNITS + 1) <= FEW_UNITS:
        return None
    return max(float(interval["low"]), floor), max(float(interval["high"]), floor)


def plus_minus(interval: Mapping[str, Any], digits: int = 3, floor: float = 0.0) -> str:
    """`` [low, high]``, or a note that there is no interval; see ``bounds`` for ``floor``."""
    ends = bounds(interval, floor)
    if ends is None:
        return f" ({no_interval(interval)})"
    return f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"


def no_interval(interval: Mapping[str, Any]) -> str:
    """``no interval: too few prompts``, for an interval that ``bounds`` has no ends for."""
    return f"no interval: too few {units(2, str(interval.get('unit') or 'unit')).removeprefix('2 ')}"


def span(interval: Mapping[str, Any] | None, digits: int = 3, floor: float = 0.0) -> str:
    """``low-high``; ``too few prompts`` (or what the units are) where they give none, ``-`` without an estimate."""
    ends = bounds(interval, floor)
    if interval is not None and ends is None and interval["point"] is not None:
        return no_interval(interval).rpartition(": ")[2]
    return MISSING if ends is None else f"{ends[0]:.{digits}f}-{ends[1]:.{digits}f}"


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


def device_line(found: Mapping[str, Any] | None) -> str:
    """How long no timed point ran on the device in a cycle; empty where device time was not recorded."""
    if not found:
        return ""
    return (
        f"Device: {found['busy_ms']:.3f} ms a cycle in its timed points, idle between them for "
        f"{found['idle_ms']['point']:.3f} ms{plus_minus(found['idle_ms'])}, {found['idle_percent']:.1f} % of the cycle "
        f"({units(found['cycles'], 'cycle')} with device spans; work outside of timed points counts as idle)"
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
