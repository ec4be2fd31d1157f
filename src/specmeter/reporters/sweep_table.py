"""The table of a sweep: settings against the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert

_STYLES = {"faster": "green", "slower": "red"}


def sweep_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of a sweep's report, in order; ``width`` in columns."""
    yield Text(inert(document["verdict"]["sentence"], 400), style="bold")
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ("", "setting", "tok/s", "x baseline", "95 % interval", "accept", "cycle ms", "break-even", "verdict")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i in (0, 1, 8) else "right", no_wrap=width >= 80)
    for row in document["arms"]:
        best = row["setting"] == document["best"]
        style = "bold" if best else _STYLES.get(row["verdict"], "")
        table.add_row("*" if best else "", *_cells(row), style=style)
    yield table
    yield "* fastest. break-even: accept length at which the setting equals the baseline."
    for row in document["arms"]:
        yield from _remarks(row)
    units = {f"{row['ratio']['n']} x {row['ratio']['unit']}" for row in document["arms"] if row["ratio"]}
    if units:
        limit = 100 * document["threshold"]
        yield f"How sure: ratios over {', '.join(sorted(units))}; for a verdict all of it lies beyond {limit:g} %."


def _cells(row: Mapping[str, Any]) -> list[str]:
    speed, ratio = row["tokens_per_s"], row["ratio"]
    interval = "-"
    if ratio and ratio["low"] is not None and ratio["high"] is not None:
        interval = f"{ratio['low']:.3f}-{ratio['high']:.3f}"
    return [
        inert(row["setting"], 40),
        f"{speed['point']:.1f}" if speed else "-",
        f"{ratio['point']:.3f}" if ratio else "-",
        interval,
        _point(row["accept_length_tokens"], 2),
        _point(row["cycle_ms"], 3),
        f"{row['break_even_tokens']:.2f}" if row["break_even_tokens"] is not None else "-",
        row["verdict"],
    ]


def _remarks(row: Mapping[str, Any]) -> Iterator[str]:
    name = inert(row["setting"], 40)
    if row["failed"]:
        yield f"{name}: {row['failed']} requests failed"
    if row["reason"]:
        yield f"{name}: {inert(row['reason'], 120)}"
    drift = row["drift"]
    if drift and drift["p_value"] < 0.01:
        yield f"{name}: speed drifted by {drift['percent']:+.1f} % over the run (p {drift['p_value']:.1g})"


def _point(interval: Mapping[str, Any] | None, digits: int) -> str:
    return f"{interval['point']:.{digits}f}" if interval else "-"
