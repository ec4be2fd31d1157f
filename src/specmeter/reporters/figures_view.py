"""The report of ``specmeter explain --figures``: what published figures say, and what they cannot all say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, heading, make_table, remark, verdict_line
from specmeter.reporters.numbers import MISSING, number


def figures_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report, in order; ``width`` in columns."""
    yield verdict_line(document["title"])
    for series in document["series"]:
        yield heading(inert(series["name"], 200))
        if series["baseline_ms"] is not None:
            slope = f"; {series['slope_ms']:.2f} ms a further step" if series["slope_ms"] is not None else ""
            yield remark(f"baseline step {series['baseline_ms']:.2f} ms{slope}")
        if any(line["cycle_ms"] is not None for line in series["lines"]):
            yield _lines(series, width)
        for line in series["lines"]:
            yield from _remarks(line)
        if series["predicted"]:
            yield from _predicted(series, width)
        if series["story"] is not None:
            yield from _story(series["story"], width)


def _lines(series: Mapping[str, Any], width: int) -> Table:
    experts = width >= NARROW and any(line["distinct_experts"] is not None for line in series["lines"])
    columns = ["setting", "accept", "break-even", "x base"]
    if width >= NARROW:
        columns = [
            "setting",
            "tok/s",
            "accept",
            "cycle ms",
            "break-even",
            "x baseline",
            *(["experts"] if experts else []),
        ]
    table = make_table(columns)
    for line in series["lines"]:
        cells = [
            number(line["accept_length_tokens"], 2), number(line["break_even_tokens"], 2), number(line["speedup"], 2),
        ]  # fmt: skip
        if width >= NARROW:
            cells = [number(line["tokens_per_s"], 1), cells[0], number(line["cycle_ms"], 2), *cells[1:]]
        table.add_row(inert(line["label"], 40), *cells, *([number(line["distinct_experts"], 1)] if experts else []))
    return table


def _remarks(line: Mapping[str, Any]) -> Iterator[Text]:
    if line["phases_ms"]:
        parts = ", ".join(f"{inert(name, 40)} {ms:.2f}" for name, ms in line["phases_ms"].items())
        yield remark(f"{inert(line['label'], 40)}: {parts} ms")
    if line["reason"] and line["cycle_ms"] is not None:
        yield remark(f"{inert(line['label'], 40)}: break-even not known, {line['reason']}")


def _predicted(series: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    first, second = series["fit"]
    yield remark(f"Fitted on {first} and {second} steps only; ms a token, and the error against the report:")
    columns = ["steps", "given accept", "error", "own accept", "error", ""]
    if width >= MIDDLE:
        columns = ["steps", "with the reported accept length", "error", "accept length predicted too", "error", ""]
    elif width < NARROW:
        columns = ["steps", "error", "own accept", ""]
    table = make_table(columns, left=(0, len(columns) - 1))
    for p in series["predicted"]:
        note = "fitted" if p["fitted"] else ("beyond" if p["extrapolated"] else "between")
        own = MISSING if p["own_error_percent"] is None else _percent(p["own_error_percent"])
        if width < NARROW:
            table.add_row(str(p["steps"]), _percent(p["error_percent"]), own, note)
            continue
        told = [number(p["tpot_ms"], 2), _percent(p["error_percent"]), number(p["own_tpot_ms"], 2), own]
        table.add_row(str(p["steps"]), *told, note)
    yield table
    yield remark("Only whole cycles are reported: a line through totals, and no promise beyond the fitted steps.")


def _percent(value: float) -> str:
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:+.1f} %"


def _story(story: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    columns = ["line", "implied accept", "if all are true"]
    if width >= MIDDLE:
        columns = ["line", "tok/s", "cycle ms", "implied accept length", "if all lines are true"]
    table = make_table(columns)
    for one in story["implied"]:
        cells = [_range(one["tokens"]) if one["possible"] else "none", _range(one["together"])]
        more = [f"{one['tok_s']:g}", _range(one["cycle_ms"])] if width >= MIDDLE else []
        table.add_row(inert(one["label"], 40), *more, *cells)
    yield table
    for conflict in story["conflicts"]:
        yield heading(f"Not both at one cycle cost: {' and '.join(inert(line, 60) for line in conflict['lines'])}")
        able = "the reported range allows it" if conflict["within_range"] else "the reported range does not allow it"
        yield _item(conflict["why"])
        yield _item(f"both can be true only if {conflict['would_need']}; {able}")
    yield heading("Measure next")
    for at, line in enumerate(story["measure_next"], 1):
        yield _item(f"{at}. {line}")


def _item(text: object) -> Padding:
    """A line that is indented with all its continuations."""
    return Padding(Text(inert(text, 500)), (0, 0, 0, 2))


def _range(ends: Sequence[float] | None) -> str:
    return "none" if ends is None else f"{ends[0]:.2f}-{ends[1]:.2f}"
