"""A sweep as text: the winner first, then every setting against the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, VERDICTS, heading, make_table, remark, strip, verdict_line
from specmeter.reporters.numbers import number, point, span, units


def sweep_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of a sweep's report, in order; ``width`` in columns."""
    yield verdict_line(document["verdict"]["sentence"], document["verdict"]["word"])
    yield ""
    yield _table(document, width)
    yield remark("* fastest. break-even: accept length at which the setting equals the baseline.")
    yield remark(
        "tok/s is the mean over requests, x baseline the geometric mean over the same prompts, accept and cycle the "
        "mean over all cycles: different means, so the columns do not divide into each other exactly."
    )
    for row in document["arms"]:
        yield from _remarks(row)
    counted = {units(row["ratio"]["n"], row["ratio"]["unit"]) for row in document["arms"] if row["ratio"]}
    if counted:
        yield heading("How sure")
        limit = 100 * document["threshold"]
        yield remark(f"ratios over {', '.join(sorted(counted))}; for a verdict all of it lies beyond {limit:g} %")


def _table(document: Mapping[str, Any], width: int) -> Table:
    names = ["", "setting", "tok/s", "x baseline"]
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
            "x baseline": point(row["ratio"]),
            "95 % interval": span(row["ratio"]),
            "accept": point(row["accept_length_tokens"], 2),
            "cycle ms": point(row["cycle_ms"]),
            "break-even": number(row["break_even_tokens"], 2),
            "verdict": inert(row["verdict"], 20),
        }
        style = "bold" if best else VERDICTS.get(row["verdict"], "")
        table.add_row("*" if best else "", *(cells[name] for name in names[1:]), style=style)
    return table


def _remarks(row: Mapping[str, Any]) -> Iterator[RenderableType]:
    name = inert(row["setting"], 40)
    if row["failed"]:
        yield remark(f"{name}: {row['failed']} requests failed")
    if row["reason"]:
        yield remark(f"{name}: {inert(row['reason'], 120)}")
    drift = row["drift"]
    if drift and drift["p_value"] < 0.01:
        yield remark(f"{name}: speed drifted by {drift['percent']:+.1f} % over the run (p {drift['p_value']:.1g})")
