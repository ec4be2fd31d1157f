"""Two runs side by side, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, heading, make_table, remark, verdict_line
from specmeter.reporters.numbers import bounds, no_interval, units
from specmeter.reporters.terminal import DEFAULT_WIDTH, print_analysis, render_analysis

_STYLES = {"more": "red", "less": "green"}
_WORDS = {"more": "slower", "less": "faster"}


def print_diff(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print a diff document, as every report is printed."""
    print_analysis({"kind": "diff", **document}, file)


def render_diff(document: Mapping[str, Any], width: int = DEFAULT_WIDTH) -> str:
    """A diff document as plain text."""
    return render_analysis({"kind": "diff", **document}, width)


def diff_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report, in order; ``width`` in columns."""
    yield verdict_line(document["sentence"], _WORDS.get(document["cycle"]["word"], ""))
    for key in ("a", "b"):
        about = document[key]
        counts = ", ".join(units(about[f"{unit}s"], unit) for unit in ("cycle", "prompt", "start"))
        yield remark(f"{key.upper()}: {inert(about['path'], 200)} ({counts}, {inert(about['status'])})")
    yield heading("Phase by phase, mean ms a cycle")
    yield _table(document, width)
    yield from _gain(document)
    if document["changes"]:
        yield heading("Set differently")
        yield _changes(document)
    else:
        yield remark("Nothing that was recorded is set differently.")
    yield heading("How sure")
    found = document["cycle"]["ratio"]
    over = " of the prompts that both runs used" if document["unit"].endswith("paired") else ""
    yield remark(
        f"Times are means over cycles{over}; B - A and B / A are of those columns. Each speed-up is its run's own, by "
        "decode rates where they were measured: the geometric mean of the prompts' ratios."
    )
    counted = units(found["n"], document["unit"].split(",")[0])
    yield remark(f"Intervals are 95 % and hold for these two recordings: {found['method']}, {counted}.")


def _table(document: Mapping[str, Any], width: int) -> Table:
    names = ["", "A ms", "B ms", "B - A ms", "95 % interval", ""]
    if width < MIDDLE:
        names.remove("95 % interval")
    if width < NARROW:
        names = ["", "A ms", "B ms", "B - A"]
    table = make_table(names, left=(0, *([len(names) - 1] if width >= NARROW else [])))
    for row in (document["cycle"], *document["phases"]):
        found = row["difference_ms"]
        name = "between points" if row["name"] == "rest" else row["name"]
        cells = [inert(name, 40), f"{row['a_ms']:.3f}", f"{row['b_ms']:.3f}", f"{found['point']:+.3f}"]
        cells += [_interval(found)] if width >= MIDDLE else []
        cells += [row["word"]] if width >= NARROW else []
        table.add_row(*cells, style=_STYLES.get(row["word"], ""))
    return table


def _gain(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    length = document["accept_length"]
    yield heading("Gain")
    if length:
        found = length["difference_tokens"]
        yield remark(
            f"Accept length: A {length['a_tokens']:.3f}, B {length['b_tokens']:.3f} tokens; B - A "
            f"{found['point']:+.3f} [{_interval(found)}] ({length['word']})"
        )
    ratio = document["cycle"]["ratio"]
    yield remark(f"Cycle, B / A: {ratio['point']:.3f} [{_interval(ratio)}]")
    for key, gain in document["speedup"].items():
        if gain:
            yield remark(f"Speed-up of {key.upper()} over its own baseline: {gain['point']:.3f} [{_interval(gain)}]")


def _changes(document: Mapping[str, Any]) -> Table:
    table = make_table(("what", "A", "B"), left=(0, 1, 2))
    for change in document["changes"]:
        values = ["-" if change[key] is None else inert(change[key], 160) for key in ("a", "b")]
        table.add_row(inert(change["name"], 80), *values)
    return table


def _interval(interval: Mapping[str, Any]) -> str:
    # The interval of a difference that may be zero is never too wide for it: only ratios are judged by their width.
    if interval["low"] is None or interval["high"] is None or (interval["low"] >= 0 and bounds(interval) is None):
        return no_interval(interval)
    return f"{interval['low']:.3f}, {interval['high']:.3f}"
