"""The text of ``specmeter explain --figures``: what published figures say, and what they cannot all say."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert


def print_figures(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print a figures document; colour only on a terminal, and not under NO_COLOR."""
    out = file or sys.stdout
    width = shutil.get_terminal_size((100, 24)).columns if out.isatty() else 100
    console = Console(file=out, width=max(width, 60), highlight=False, markup=False, emoji=False)
    console.print(Text(inert(document["title"], 200), style="bold"))
    for series in document["series"]:
        for part in _series(series):
            console.print(part)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _series(series: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield ""
    yield Text(inert(series["name"], 200), style="bold")
    if series["baseline_ms"] is not None:
        slope = f"; {series['slope_ms']:.2f} ms a further step" if series["slope_ms"] is not None else ""
        yield f"baseline step {series['baseline_ms']:.2f} ms{slope}"
    if any(line["cycle_ms"] is not None for line in series["lines"]):
        yield _lines(series)
    for line in series["lines"]:
        yield from _remarks(line)
    if series["predicted"]:
        yield from _predicted(series)
    if series["story"] is not None:
        yield from _story(series["story"])


def _lines(series: Mapping[str, Any]) -> Table:
    experts = any(line["distinct_experts"] is not None for line in series["lines"])
    table = _table(
        "setting", "tok/s", "accept", "cycle ms", "break-even", "x baseline", *(["experts"] if experts else [])
    )
    for line in series["lines"]:
        cells = [
            _number(line["tokens_per_s"], 1), _number(line["accept_length_tokens"], 2), _number(line["cycle_ms"], 2),
            _number(line["break_even_tokens"], 2), _number(line["speedup"], 2),
        ]  # fmt: skip
        table.add_row(inert(line["label"], 40), *cells, *([_number(line["distinct_experts"], 1)] if experts else []))
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _remarks(line: Mapping[str, Any]) -> Iterator[str]:
    if line["phases_ms"]:
        parts = ", ".join(f"{inert(name, 40)} {ms:.2f}" for name, ms in line["phases_ms"].items())
        yield f"{inert(line['label'], 40)}: {parts} ms"
    if line["reason"] and line["cycle_ms"] is not None:
        yield f"{inert(line['label'], 40)}: break-even not known, {inert(line['reason'], 120)}"


def _predicted(series: Mapping[str, Any]) -> Iterator[RenderableType]:
    first, second = series["fit"]
    yield f"\nFitted on {first} and {second} steps only; ms a token, and the error against the report"
    table = _table("steps", "with the reported accept length", "error", "accept length predicted too", "error", "")
    for p in series["predicted"]:
        note = "fitted" if p["fitted"] else ("extrapolated" if p["extrapolated"] else "between")
        own = p["own_error_percent"]
        table.add_row(
            str(p["steps"]), f"{p['tpot_ms']:.2f}", _percent(p["error_percent"]),
            _number(p["own_tpot_ms"], 2), "-" if own is None else _percent(own), note,
        )  # fmt: skip
    yield table
    yield "Only whole cycles are reported, so this is a line through totals: beyond the fitted steps it is no promise."


def _percent(value: float) -> str:
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:+.1f} %"


def _story(story: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = _table("line", "tok/s", "cycle ms", "implied accept length", "if all lines are true")
    for one in story["implied"]:
        joint = one["together"]
        table.add_row(
            inert(one["label"], 40), f"{one['tok_s']:g}", _range(one["cycle_ms"]),
            _range(one["tokens"]) if one["possible"] else "none", _range(joint) if joint else "none",
        )  # fmt: skip
    yield table
    for conflict in story["conflicts"]:
        yield f"\nNot both at one cycle cost: {' and '.join(inert(line, 60) for line in conflict['lines'])}"
        yield f"  {inert(conflict['why'], 300)}"
        able = "the reported range allows it" if conflict["within_range"] else "the reported range does not allow it"
        yield f"  both can be true only if {inert(conflict['would_need'], 300)}; {able}"
    yield "\nMeasure next"
    for number, line in enumerate(story["measure_next"], 1):
        yield f"  {number}. {inert(line, 300)}"


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"
