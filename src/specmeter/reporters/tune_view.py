"""The report of a tune: the winner and its proof, what was tried, what could not run, what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.compare_view import compare_parts
from specmeter.reporters.inert import inert
from specmeter.reporters.language import NARROW, command_line, heading, make_table, remark, verdict_line
from specmeter.reporters.numbers import number, plus_minus

MAX_ROWS = 20
NEAR = (
    "the baseline of the search is k=0 of a switched start: no drafts, but the draft's forward still runs; the proof "
    "has plain decoding"
)


def tune_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report in order; ``width`` in columns."""
    for place, level in enumerate(document["levels"]):
        if place:
            yield ""
        many = len(document["levels"]) > 1
        at = f"At {level['concurrency']} requests at once: " if many else ""
        yield verdict_line(at + level["verdict"]["sentence"], level["verdict"]["word"])
        yield from _ratios(level)
        yield heading("What was tried")
        yield _tried(level["search"], level["winner"]["label"], width)
        tried = level["search"]["tried"]
        if level.get("chosen_by") == "proof":
            yield "* chosen by the proof below, against the search"
        elif tried and tried[0]["label"] != level["winner"]["label"]:
            yield "* chosen: each mean weighed with its starts, their spread, and the curve through the chain lengths"
        if document.get("baseline_is_k0"):
            yield remark(NEAR)
        yield from _rest(level["search"])
        if level["proof"] is not None:
            yield heading("Proof, in starts of their own")
            yield from compare_parts(level["proof"], width)
    yield from _left_out(document)
    yield from _how_to_run(document)


def _ratios(level: Mapping[str, Any]) -> Iterator[RenderableType]:
    pairs = [row for row in (level["proof"]["pairs"] if level["proof"] else []) if row["arm"] == "tuned"]
    if level["against_start"] is not None:
        pairs.append(level["against_start"])
    for row in pairs:
        ratio = row["ratio"]
        if ratio is None:
            continue
        name = row["against"] + (f" ({inert(level['starting_point'])})" if row["against"] == "starting point" else "")
        yield remark(f"against the {name}: x {ratio['point']:.3f}{plus_minus(ratio)}, {inert(row['verdict'])}")


def _tried(search: Mapping[str, Any], winner: str, width: int) -> Table:
    wide = width >= NARROW
    columns = ["", "tried", "starts", "tok/s", "predicted"] if wide else ["", "tried", "tok/s"]
    table = make_table([*columns, ""], left=(0, 1, len(columns)))
    for row in search["tried"][:MAX_ROWS]:
        best = row["label"] == winner
        cells = {
            "": "*" if best else "", "tried": inert(row["label"], 70), "starts": str(row["starts"]),
            "tok/s": number(row["tokens_per_s"], 1), "predicted": number(row["predicted_tokens_per_s"], 1),
        }  # fmt: skip
        out = "raced out" if row["raced_out"] else ""
        table.add_row(*(cells[name] for name in columns), out, style="bold" if best else "")
    return table


def _rest(search: Mapping[str, Any]) -> Iterator[RenderableType]:
    hidden = len(search["tried"]) - MAX_ROWS
    if hidden > 0:
        yield remark(f"and {hidden} more (analysis.json holds all)")
    for row in search["infeasible"]:
        yield remark(f"infeasible: {inert(row['label'], 70)}: {inert(row['cause'], 300)}")
    for row in search["not_run"]:
        yield remark(f"not run: {inert(row['label'], 70)}: {inert(row['reason'], 200)}")
    took = f"{search['starts']} server start{'s' if search['starts'] != 1 else ''}, {search['server_s']:.0f} s"
    yield remark(f"The search took {took}; ended by {inert(search['ended_by'], 120)}")


def _left_out(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    for row in document["space"]["skipped"]:
        yield remark(f"left out of the space: {inert(row['name'], 60)}: {inert(row['reason'], 300)}")


def _how_to_run(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    run = document.get("command_line")
    if run:
        yield heading("The command")
        yield command_line(run)
    for name in document.get("files", []):
        yield remark(f"written: {inert(name, 200)}")
