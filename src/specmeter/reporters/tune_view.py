"""The report of a tune: the winner and its proof, what was tried, what could not run, what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.compare_view import compare_parts
from specmeter.reporters.inert import inert

MAX_ROWS = 20


def tune_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report in order; ``width`` in columns."""
    for level in document["levels"]:
        if len(document["levels"]) > 1:
            yield Text(f"\nAt {level['concurrency']} requests at once", style="bold")
        yield Text(inert(level["verdict"]["sentence"], 400), style="bold")
        yield from _ratios(level)
        yield _tried(level["search"], level["winner"]["label"])
        yield from _rest(level["search"])
        if level["proof"] is not None:
            yield Text("\nProof, in starts of their own", style="bold")
            yield from compare_parts(level["proof"], width)
    yield from _left_out(document)
    yield from _how_to_run(document)


def _ratios(level: Mapping[str, Any]) -> Iterator[str]:
    pairs = [row for row in (level["proof"]["pairs"] if level["proof"] else []) if row["arm"] == "tuned"]
    if level["against_start"] is not None:
        pairs.append(level["against_start"])
    for row in pairs:
        ratio = row["ratio"]
        if ratio is None:
            continue
        bounds = f"{ratio['low']:.3f}-{ratio['high']:.3f}" if ratio["low"] and ratio["high"] else "no interval"
        name = row["against"] + (f" ({inert(level['starting_point'])})" if row["against"] == "starting point" else "")
        yield f"against the {name}: x {ratio['point']:.3f} [{bounds}], {row['verdict']}"


def _tried(search: Mapping[str, Any], winner: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "tried", "starts", "tok/s", "predicted", ""):
        table.add_column(name, justify="right" if name in ("starts", "tok/s", "predicted") else "left")
    for row in search["tried"][:MAX_ROWS]:
        predicted = row["predicted_tokens_per_s"]
        table.add_row(
            "*" if row["label"] == winner else "",
            inert(row["label"], 70),
            str(row["starts"]),
            f"{row['tokens_per_s']:.1f}",
            "-" if predicted is None else f"{predicted:.1f}",
            "raced out" if row["raced_out"] else "",
            style="bold" if row["label"] == winner else "",
        )
    return table


def _rest(search: Mapping[str, Any]) -> Iterator[str]:
    hidden = len(search["tried"]) - MAX_ROWS
    if hidden > 0:
        yield f"and {hidden} more (analysis.json holds all)"
    for row in search["infeasible"]:
        yield f"infeasible: {inert(row['label'], 70)}: {inert(row['cause'], 300)}"
    for row in search["not_run"]:
        yield f"not run: {inert(row['label'], 70)}: {inert(row['reason'], 200)}"
    yield f"The search took {search['starts']} server starts, {search['server_s']:.0f} s; ended by {search['ended_by']}"


def _left_out(document: Mapping[str, Any]) -> Iterator[str]:
    for row in document["space"]["skipped"]:
        yield f"left out of the space: {inert(row['name'], 60)}: {inert(row['reason'], 300)}"


def _how_to_run(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    run = document.get("command_line")
    if run:
        yield Text("\nThe command", style="bold")
        yield inert(run, 4000)
    for name in document.get("files", []):
        yield f"written: {inert(name, 200)}"
