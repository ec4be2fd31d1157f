"""A sweep as text: the winner first, then every setting against the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, VERDICTS, heading, make_table, remark, strip, verdict_line
from specmeter.reporters.numbers import mostly_stalled, number, point, span, stalled_line, units


def sweep_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of a sweep's report, in order; ``width`` in columns."""
    yield verdict_line(document["verdict"]["sentence"], document["verdict"]["word"])
    for row in document["arms"]:
        if mostly_stalled(row.get("stalled")):
            yield remark(f"{inert(row['setting'], 40)}: {mostly_stalled(row.get('stalled'))}")
    yield ""
    yield _table(document, width)
    if document.get("shortened"):
        yield remark(shortened_words(document["shortened"]))
    if "one_start" in document:
        yield from _switched(document, width)
    yield from _columns_explained(width)
    for row in document["arms"]:
        yield from _remarks(row)
    counted = {units(row["ratio"]["n"], row["ratio"]["unit"]) for row in document["arms"] if row["ratio"]}
    if counted:
        yield heading("How sure")
        limit = 100 * document["threshold"]
        yield remark(f"ratios over {', '.join(sorted(counted))}; for a verdict all of it lies beyond {limit:g} %")


def shortened_words(found: Mapping[str, Any]) -> str:
    """What a sweep left out that would have taken longer than its time."""
    return (
        f"Shortened to {found['passes']} of {found['planned']} passes over the settings: all would have taken longer "
        f"than the {found['budget_s']:.0f} s there were, so intervals are wider."
    )


def _columns_explained(width: int) -> Iterator[RenderableType]:
    """What the columns mean that are shown in this width."""
    wide = width >= MIDDLE
    even = " break-even: accept length at which the setting equals the baseline." if wide else ""
    yield remark(f"* fastest.{even}")
    cycles = ", accept and cycle the mean over all cycles" if wide else ""
    yield remark(
        f"tok/s is the mean over requests, x baseline the geometric mean over the same prompts{cycles}: different "
        "means, so the columns do not divide into each other exactly."
    )


def _table(document: Mapping[str, Any], width: int) -> Table:
    against = f"x {inert(document['baseline'] or 'baseline', 24)}"
    names = ["", "setting", "tok/s", against]
    names += ["95 % interval"] if width >= NARROW else []
    names += ["accept", "cycle ms", "break-even"] if width >= MIDDLE else []
    left = [0, 1, len(names)]
    names += ["verdict", *([""] if width >= MIDDLE + 36 else [])]
    table = make_table(names, left=[*left, len(names) - 1])
    most = max((row["tokens_per_s"]["point"] for row in document["arms"] if row["tokens_per_s"]), default=0.0)
    for row in document["arms"]:
        best = row["setting"] == document["best"]
        speed = row["tokens_per_s"]
        cells = {
            "": strip(speed["point"] / most if speed and most else None),
            "setting": inert(row["setting"], 40),
            "tok/s": point(speed, 1),
            against: point(row["ratio"]),
            "95 % interval": span(row["ratio"]),
            "accept": point(row["accept_length_tokens"], 2),
            "cycle ms": point(row["cycle_ms"]),
            "break-even": number(row["break_even_tokens"], 2),
            "verdict": inert(row["verdict"], 20),
        }
        style = "bold" if best else VERDICTS.get(row["verdict"], "")
        table.add_row("*" if best else "", *(cells[name] for name in names[1:]), style=style)
    return table


def _switched(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """That one start was switched, what the engine itself counted there, and the starts that confirm."""
    reference = inert(document["one_start"]["reference"], 20)
    against = "x and break-even above are" if width >= MIDDLE else "x above is"
    yield remark(
        f"one start, draft steps switched between requests. {reference}: no drafts, but the draft's forward over the "
        f"accepted tokens still runs, so it is not plain decoding; {against} against it."
    )
    rows = document["one_start"]["verified"]
    wrong = [inert(row["setting"], 20) for row in rows if row["agrees"] is False]
    if wrong:
        yield remark(f"the engine's own counters do not agree with what was set at {', '.join(wrong)}")
    elif rows and all(row["agrees"] for row in rows):
        yield remark("read back at every turn; the engine's own counters show as many drafts a cycle as were set")
    near, confirmation = document["near_baseline"], document["confirmation"]
    if confirmation is not None:
        yield heading(f"In starts of their own, {confirmation['starts']} a side")
        yield _table(confirmation, width)
        same = confirmation["same_output"]
        yield remark(f"answers switched to and started with: {same['equal']} of {same['compared']} prompts the same")
    if near is not None:
        held = f"{span(near)}, at {100 * near['level']:.0f} %"
        yield remark(f"{reference} runs at {point(near)} x plain decoding ({held}): {near['method']}")


def _remarks(row: Mapping[str, Any]) -> Iterator[RenderableType]:
    name = inert(row["setting"], 40)
    if row["failed"]:
        yield remark(f"{name}: {row['failed']} requests failed")
    if row["reason"]:
        yield remark(f"{name}: {inert(row['reason'], 120)}")
    if stalled_line(row.get("stalled")) and not mostly_stalled(row.get("stalled")):
        yield remark(f"{name}: {stalled_line(row.get('stalled'))}")
    drift = row["drift"]
    if drift and drift["p_value"] < 0.01:
        yield remark(f"{name}: speed drifted by {drift['percent']:+.1f} % over the run (p {drift['p_value']:.1g})")
