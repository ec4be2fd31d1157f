"""Deep windows as text: that the profiler was on for so many cycles only, what that cost, and what took the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.inert import inert
from specmeter.reporters.language import NARROW, heading, make_table, remark
from specmeter.reporters.numbers import plus_minus, units

LEAST_PERCENT = 0.5


def deep_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The section of ``document["deep"]``; nothing where there is none. The tables are the lowest rank's."""
    windows = document.get("deep") or []
    if not windows:
        return
    yield heading("Deep window")
    shown: set[str] = set()
    for window in windows:
        first = window["setting"] not in shown
        shown.add(window["setting"])
        yield remark(cost_words(window), 600)
        if first:
            for note in window["notes"]:
                yield remark(f"  {note}")
            if window["top"]:
                yield _table(window, width)


def cost_words(window: Mapping[str, Any]) -> str:
    """How many cycles ran under the profiler, and what it did to them and to those after; outside text is inert."""
    kind = "operators on the host" if window["on_cpu"] else "CUPTI"
    who = f"rank {window['rank']}, " if window["rank"] >= 0 else ""
    label = f"{inert(window['setting'], 40)}: " if window["setting"] else ""
    text = (
        f"{label}{who}{units(window['cycles'], 'cycle')} ran under torch's profiler ({kind}), and only those"
        f"{', on ' + inert(window['device'], 60) if window['device'] else ''}: "
    )
    inside, outside, ratio = window["cycle_inside_ms"], window["cycle_outside_ms"], window["ratio"]
    left = window.get("left_ratio")
    stays = left if left and left["low"] > 1 else None
    around = "just before" if stays else "just before and after"
    if ratio and inside and outside:
        text += (
            f"{inside['point']:.3f} ms a cycle{plus_minus(inside)} against {outside['point']:.3f} ms"
            f"{plus_minus(outside)} {around} without it, x {ratio['point']:.3f}{plus_minus(ratio)}"
        )
    else:
        text += f"its cost is not known ({inert(window['reason'], 100) or 'no ring'})"
    if stays:
        text += f". Cycles after it took x {stays['point']:.3f}{plus_minus(stays)} those before: it stays in part"
    seconds = [f"{name} {value:.2f} s" for name, value in window["seconds"].items() if value is not None]
    lost = sum(window["lost_ms"].values())
    return f"{text}. Took {', '.join(seconds)}; cycles lost {lost:.0f} ms to that. Times to {_error(window)}."


def _error(window: Mapping[str, Any]) -> str:
    error = window["clock_error_us"]
    return "an unknown error" if error is None else f"{error:.1f} us"


def _table(window: Mapping[str, Any], width: int) -> Table:
    wide = width >= NARROW
    what = "operator" if window["on_cpu"] else "kernel"
    table = make_table(["phase", f"{what}, own time", "ms", "share", *(["calls"] if wide else [])], left=(0, 1))
    last = ""
    for row in window["top"]:
        if row["percent"] < LEAST_PERCENT:
            continue
        name = inert(row["name"], 60 if wide else 24)
        cells = [f"{row['ms']:.3f}", f"{row['percent']:.1f} %", *([f"{row['calls']:.1f}"] if wide else [])]
        table.add_row(row["phase"] if row["phase"] != last else "", name, *cells)
        last = row["phase"]
    return table
