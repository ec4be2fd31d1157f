"""Device time of deep windows as text: phases, what verify is made of, where idle time comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters import device_rows as rows
from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, heading, make_table, remark

# Columns that are left out in a narrow terminal, the least wanted first.
_PHASES_MIDDLE = ("phase", "busy", "idle in", "before", "host", "waits", "delay us", "bound by")
_PHASES_NARROW = ("phase", "busy", "idle in", "bound by")
_WIDTH_NARROW = ("class", "verify ms", "plain ms", "factor")
_IDLE_NARROW = ("the host was in", "until", "ms")
MOST_NAMES = 5
_LEGEND = (
    "Mean ms a cycle. busy: kernels of the phase on any stream; idle in: nothing ran between its first and last "
    "kernel; before: nothing ran until its first kernel; host and waits: the host's own time in it; delay: from the "
    "end of the launching call to the kernel's begin, median / p95; bound by: what most of its time on the device is"
)


def device_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The section on ``document["device"]["windows"]`` and ``document["verify_width"]``; nothing without a window."""
    windows = (document.get("device") or {}).get("windows") or []
    if windows:
        yield from _window(windows[0], width)
        yield from _ranks(windows)
    found = document.get("verify_width")
    if found:
        place = "" if not found["classes"] else ", operators of the host" if found["on_cpu"] else ", on the device"
        yield heading(f"Verify against a plain step{place}")
        yield remark(found["sentence"])
        if found["classes"]:
            yield from _width(found, width)
        for other in found["others"]:
            yield remark(f"{inert(other['setting'] or 'another window', 60)}: {other['sentence']}")


def _window(window: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    yield heading(rows.heading_of(window))
    if window["verdict"]:
        yield remark(window["verdict"]["sentence"])
    if window["reason"]:
        yield remark(f"No device times: {window['reason']}.")
    if not window["cycles"]:
        return
    if window["verdict"]:
        yield remark(rows.facts_line(window))
        yield _table(rows.phase_rows(window), width, _PHASES_NARROW, _PHASES_MIDDLE)
        yield remark(_LEGEND, 800)
    yield heading("What runs in each phase" + (" (operators on the host)" if window["on_cpu"] else ""))
    yield _table(rows.class_rows(window), width)
    if window["verdict"]:
        yield from _details(window, width)
    for line in rows.other_cycles(window):
        yield remark(line)


def _details(window: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    if window["draft_steps"]:
        yield heading("Draft steps inside the graph")
        yield _table(rows.step_rows(window), width)
    if window["idle"]["rows"]:
        yield heading("Why the device is idle")
        yield _table(rows.idle_rows(window), width, _IDLE_NARROW, left=(0, 1, 2))
    if window["unknown"]:
        yield heading("Kernels of no known class")
        yield _table(rows.name_rows(window["unknown"][:MOST_NAMES]), width)


def _ranks(windows: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    if len(windows) < 2:
        return
    yield heading("The other windows")
    for window in windows[1:]:
        yield remark(rows.other_window(window))


def _width(found: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    columns, listed = rows.width_rows(found)
    yield _table((columns[:-1], [row[:-1] for row in listed]), width, _WIDTH_NARROW)
    for row in found["classes"]:
        if row["reason"]:
            yield remark(f"{rows.title_of(row['class'])}: {row['reason']}")


def _table(
    cells: rows.Cells,
    width: int,
    narrow: Sequence[str] = (),
    middle: Sequence[str] = (),
    left: Sequence[int] = (0,),
) -> Table:
    """A table; below NARROW columns only ``narrow``, below MIDDLE only ``middle`` are shown (empty: all)."""
    columns, listed = cells
    wanted = narrow if width < NARROW else middle if width < MIDDLE + len(columns) * 2 else ()
    shown = [i for i, name in enumerate(columns) if not wanted or name in wanted]
    table = make_table([columns[i] for i in shown], left=[at for at, i in enumerate(shown) if i in left])
    for row in listed:
        table.add_row(*(inert(row[i], 60) for i in shown))
    return table
