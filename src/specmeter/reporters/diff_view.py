"""Two runs side by side, as text."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert
from specmeter.reporters.numbers import bounds, no_interval

_STYLES = {"more": "red", "less": "green"}


def print_diff(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print a diff document; colour only on a terminal, and not under NO_COLOR."""
    out = file or sys.stdout
    width = shutil.get_terminal_size((100, 24)).columns if out.isatty() else 100
    console = Console(file=out, width=max(width, 40), highlight=False, markup=False, emoji=False)
    for part in _parts(document):
        console.print(part)


def render_diff(document: Mapping[str, Any], width: int = 100) -> str:
    """A diff document as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False, color_system=None)
    for part in _parts(document):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(inert(document["sentence"], 400), style="bold")
    for key in ("a", "b"):
        about = document[key]
        counts = f"{about['cycles']} cycles, {about['prompts']} prompts, {about['starts']} start(s)"
        yield f"{key.upper()}: {inert(about['path'], 60)} ({counts}, {inert(about['status'])})"
    yield ""
    yield _table(document)
    yield from _gain(document)
    yield _changes(document) if document["changes"] else "Nothing that was recorded is set differently."
    yield f"\nHow sure: 95 % intervals on B - A, the unit is a {document['unit']}."


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(("a cycle", "A ms", "B ms", "B - A ms", "95 % interval", "")):
        table.add_column(name, justify="left" if i in (0, 5) else "right", no_wrap=True)
    for row in (document["cycle"], *document["phases"]):
        difference = row["difference_ms"]
        name = "between points" if row["name"] == "rest" else row["name"]
        table.add_row(
            inert(name, 40), f"{row['a_ms']:.3f}", f"{row['b_ms']:.3f}", f"{difference['point']:+.3f}",
            _interval(difference), row["word"], style=_STYLES.get(row["word"], ""),
        )  # fmt: skip
    return table


def _gain(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield ""
    length = document["accept_length"]
    if length:
        yield (
            f"Accept length: {length['a_tokens']:.3f} -> {length['b_tokens']:.3f} tokens, "
            f"{length['difference_tokens']['point']:+.3f} [{_interval(length['difference_tokens'])}] ({length['word']})"
        )
    ratio = document["cycle"]["ratio"]
    yield f"Cycle, B / A: {ratio['point']:.3f} [{_interval(ratio)}] ({ratio['method']}, {ratio['n']} units)"
    for key, gain in document["speedup"].items():
        if gain:
            yield f"Speed-up over its own baseline, {key.upper()}: {gain['point']:.3f} [{_interval(gain)}]"


def _changes(document: Mapping[str, Any]) -> Table:
    table = Table(title="\nSet differently", title_justify="left", title_style="bold", box=None, header_style="dim")
    for name in ("what", "A", "B"):
        table.add_column(name, overflow="fold")
    for change in document["changes"]:
        values = ["-" if change[key] is None else inert(change[key], 160) for key in ("a", "b")]
        table.add_row(inert(change["name"], 80), *values)
    return table


def _interval(interval: Mapping[str, Any]) -> str:
    # The interval of a difference that may be zero is never too wide for it: only ratios are judged by their width.
    if interval["low"] is None or interval["high"] is None or (interval["low"] >= 0 and bounds(interval) is None):
        return no_interval(interval)
    return f"{interval['low']:.3f}, {interval['high']:.3f}"
