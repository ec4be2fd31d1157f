"""The report of a comparison: verdict, ratios, starts, differences of the resolved arguments, equality of output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert

_STYLES = {"faster": "green", "slower": "red"}
MAX_DIFFERENCES = 30


def compare_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report in order; ``width`` in columns."""
    yield Text(inert(document["verdict"]["sentence"], 400), style="bold")
    yield _arms(document, width)
    yield from _decides(document)
    yield from _spread(document)
    if "differences" in document:
        yield from _differences(document)
    if "output" in document:
        yield from _output(document["output"], document["reference"])


def _arms(document: Mapping[str, Any], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (
        "arm",
        "starts",
        "tok/s",
        "accept",
        f"x {inert(document['reference'], 24)}",
        "95 % interval",
        "verdict",
    ):
        table.add_column(name, justify="left" if name in ("arm", "verdict") else "right", no_wrap=width >= 80)
    pairs = {row["arm"]: row for row in document["pairs"]}
    for arm in document["arms"]:
        row = pairs.get(arm["name"])
        speed, length = arm["tokens_per_s"], arm.get("accept_length_tokens")
        cells = [
            inert(arm["name"], 40),
            str(arm["starts"]),
            f"{speed['point']:.1f}" if speed else "-",
            f"{length:.2f}" if length else "-",
        ]
        ratio = row["ratio"] if row else None
        cells += [f"{ratio['point']:.3f}" if ratio else "-", _interval(ratio), row["verdict"] if row else "reference"]
        table.add_row(*cells, style=_STYLES.get(row["verdict"], "") if row else "")
    return table


def _interval(ratio: Mapping[str, Any] | None) -> str:
    if not ratio or not ratio["low"] or ratio["high"] is None:
        return "-"
    return f"{ratio['low']:.3f}-{ratio['high']:.3f}"


def _decides(document: Mapping[str, Any]) -> Iterator[str]:
    for row in document["pairs"]:
        name = inert(row["arm"], 40)
        if row["reason"]:
            yield f"{name}: {inert(row['reason'], 200)}"
        said = []
        if row["starts_to_decide"]:
            said.append(f"{row['starts_to_decide']} starts a side")
        if row["blocks_to_decide"]:
            said.append(f"{row['blocks_to_decide']} counted blocks a start")
        if said:
            yield f"{name}: expected to decide it, if point and spread stay as they are: {' or '.join(said)}"
        drift = row["drift"]
        if drift and drift["p_value"] < 0.05:
            p = f"p {drift['p_value']:.2g}"
            yield f"{name}: speed drifted by {drift['percent']:+.1f} % over the session ({p}); taken out of the ratio"


def _spread(document: Mapping[str, Any]) -> Iterator[str]:
    limit = 100 * document["threshold"]
    if document["start_percent"] is not None:
        yield (
            f"Equal starts differ by {document['start_percent']:.2f} % (standard deviation) beyond what their blocks "
            f"explain; equal blocks of one start by {document['block_percent']:.2f} %"
        )
    drift = document["drift_in_starts"]
    if drift and drift["p_value"] < 0.05:
        p = f"p {drift['p_value']:.2g}"
        yield f"Within starts the speed drifts by {drift['percent']:+.1f} % ({p}); all sides have the same schedule"
    methods = {
        f"{r['ratio']['method']}, {r['ratio']['n']} of unit {r['ratio']['unit']}"
        for r in document["pairs"]
        if r["ratio"]
    }
    for method in sorted(methods):
        yield f"How sure: {method}; each interval is 95 % by itself; a verdict needs all of it beyond {limit:g} %"


def _differences(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = document["differences"]
    if not rows:
        yield "Resolved arguments: the same on all sides, as far as the engine tells them"
        return
    table = Table(title="\nResolved arguments that differ", title_justify="left", box=None, pad_edge=False)
    table.title_style, table.header_style = "bold", "dim"
    names = [arm["name"] for arm in document["arms"]]
    for name in ("argument", *names):
        table.add_column(inert(name, 30), overflow="fold")
    for row in rows[:MAX_DIFFERENCES]:
        values = [row["values"].get(name) for name in names]
        table.add_row(inert(row["argument"], 60), *("-" if value is None else inert(value, 80) for value in values))
    yield table
    if len(rows) > MAX_DIFFERENCES:
        yield f"and {len(rows) - MAX_DIFFERENCES} more (analysis.json holds all)"


def _output(output: Mapping[str, Any], reference: str) -> Iterator[str]:
    if not output["checked"]:
        yield f"Output not compared: {inert(output['reason'], 120)}"
        return
    for row in output["arms"]:
        if row["arm"] != reference:
            yield (
                f"Greedy output of {inert(row['arm'], 40)}: {row['equal']} of {row['compared']} answers equal those of "
                f"{inert(reference, 40)}; {row['steady']} answers are the same in every repeat"
            )
            for unequal in row["unequal"][:3]:
                place = unequal["first_difference_chars"]
                yield f"  prompt {inert(unequal['prompt'], 40)} differs from character {place} on"
