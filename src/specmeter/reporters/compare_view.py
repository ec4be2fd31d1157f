"""The report of a comparison: verdict, ratios, starts, differences of the resolved arguments, equality of output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, VERDICTS, heading, make_table, remark, verdict_line
from specmeter.reporters.numbers import number, point, span, units

MAX_DIFFERENCES = 30


def compare_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report in order; ``width`` in columns."""
    yield verdict_line(document["verdict"]["sentence"], document["verdict"]["word"])
    yield ""
    yield _arms(document, width)
    if document.get("design", {}).get("baseline_is_k0"):
        yield remark("without drafts the draft's forward still ran in the switched start: k=0, not plain decoding")
    yield from _decides(document)
    if "differences" in document:
        yield from _differences(document)
    if "output" in document:
        yield heading("Output")
        yield from _output(document["output"], document["reference"])
    yield heading("How sure")
    yield from _spread(document)


def _arms(document: Mapping[str, Any], width: int) -> Table:
    against = f"x {inert(document['reference'], 24)}" if width >= NARROW else "ratio"
    names = ["arm", "starts", "tok/s", "accept", against, "95 % interval", "verdict"]
    if width < MIDDLE:
        names.remove("accept")
    if width < NARROW:
        names.remove("starts")
        names.remove("95 % interval")
    table = make_table(names, left=(0, len(names) - 1))
    pairs = {row["arm"]: row for row in document["pairs"]}
    for arm in document["arms"]:
        row = pairs.get(arm["name"])
        ratio = row["ratio"] if row else None
        cells = {
            "arm": inert(arm["name"], 40), "starts": str(arm["starts"]), "tok/s": point(arm["tokens_per_s"], 1),
            "accept": number(arm.get("accept_length_tokens"), 2), against: point(ratio), "95 % interval": span(ratio),
            "verdict": inert(row["verdict"], 60) if row else "reference",
        }  # fmt: skip
        style = VERDICTS.get(row["verdict"], "") if row else ""
        table.add_row(*(cells[name] for name in names), style=style)
    return table


def _decides(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    for row in document["pairs"]:
        name = inert(row["arm"], 40)
        if row["reason"]:
            yield remark(f"{name}: {inert(row['reason'], 200)}")
        said = []
        if row["starts_to_decide"]:
            said.append(f"{row['starts_to_decide']} starts a side")
        if row["blocks_to_decide"]:
            said.append(f"{row['blocks_to_decide']} counted blocks a start")
        if said:
            yield remark(f"{name}: expected to decide it, if point and spread stay as they are: {' or '.join(said)}")
        drift = row["drift"]
        if drift and drift["p_value"] < 0.05:
            p = f"p {drift['p_value']:.2g}"
            change = f"{drift['percent']:+.1f} % over the session ({p})"
            yield remark(f"{name}: speed drifted by {change}; taken out of the ratio")


def _spread(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    limit = 100 * document["threshold"]
    if document["start_percent"] is not None:
        yield remark(
            f"Equal starts differ by {document['start_percent']:.2f} % (standard deviation) beyond what their blocks "
            f"explain; equal blocks of one start by {document['block_percent']:.2f} %"
        )
    drift = document["drift_in_starts"]
    if drift and drift["p_value"] < 0.05:
        p = f"p {drift['p_value']:.2g}"
        change = f"{drift['percent']:+.1f} % ({p})"
        yield remark(f"Within starts the speed drifts by {change}; all sides have the same schedule")
    methods = {
        f"{inert(r['ratio']['method'], 120)}, {units(r['ratio']['n'], r['ratio']['unit'])}"
        for r in document["pairs"]
        if r["ratio"]
    }
    for method in sorted(methods):
        yield remark(f"{method}; each interval is 95 % by itself; a verdict needs all of it beyond {limit:g} %")


def _differences(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = document["differences"]
    if not rows:
        yield remark("Resolved arguments: the same on all sides, as far as the engine tells them")
        return
    names = [arm["name"] for arm in document["arms"]]
    yield heading("Resolved arguments that differ")
    table = make_table(["argument", *(inert(name, 30) for name in names)], left=range(len(names) + 1))
    for row in rows[:MAX_DIFFERENCES]:
        values = [row["values"].get(name) for name in names]
        table.add_row(inert(row["argument"], 60), *("-" if value is None else inert(value, 80) for value in values))
    yield table
    if len(rows) > MAX_DIFFERENCES:
        yield remark(f"and {len(rows) - MAX_DIFFERENCES} more (analysis.json holds all)")


def _output(output: Mapping[str, Any], reference: str) -> Iterator[RenderableType]:
    if not output["checked"]:
        yield remark(f"Output not compared: {inert(output['reason'], 120)}")
        return
    for row in output["arms"]:
        if row["arm"] != reference:
            yield remark(
                f"Greedy output of {inert(row['arm'], 40)}: {row['equal']} of {row['compared']} answers equal those of "
                f"{inert(reference, 40)}; {row['steady']} answers are the same in every repeat"
            )
            for unequal in row["unequal"][:3]:
                place = f"differs from character {unequal['first_difference_chars']} on"
                yield remark(f"  prompt {inert(unequal['prompt'], 40)} {place}{_tie(unequal)}")


def _tie(unequal: Mapping[str, Any]) -> str:
    """What the server's log probabilities say of the place where two answers part; empty where it told none."""
    if unequal.get("gap_nats") is None:
        return ""
    ours, theirs = (repr(str(token))[:40] for token in unequal["tokens"])
    word = "a near-tie" if unequal["near_tie"] else "no near-tie"
    return f": {inert(ours, 40)} and {inert(theirs, 40)} are {unequal['gap_nats']:.3f} nats apart there, {word}"
