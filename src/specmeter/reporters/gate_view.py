"""The text of ``specmeter gate``: passed or failed, and each quantity with what was allowed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert

_NAMES = {"accept_length": "accept length", "cycle": "cycle", "break_even": "break-even"}
_STYLES = {"worse": "red", "unsettled": "yellow", "not worse": "green"}


def print_gate(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print a gate's result; colour only on a terminal, and not under NO_COLOR."""
    out = file or sys.stdout
    width = shutil.get_terminal_size((100, 24)).columns if out.isatty() else 100
    console = Console(file=out, width=max(width, 60), highlight=False, markup=False, emoji=False)
    for part in gate_parts(document):
        console.print(part)


def gate_parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The parts of the text, in order."""
    findings = document["findings"]
    worse = [f for f in findings if f["word"] == "worse"]
    open_ = [f for f in findings if f["word"] == "unsettled"]
    if worse:
        yield Text(f"FAILED: {'; '.join(_said(f) for f in worse)}", style="bold red")
    elif not document["passed"]:
        yield Text(f"FAILED: {len(open_)} quantities are not settled (--settled)", style="bold red")
    elif open_:
        yield Text(f"passed: nothing is shown to be worse; {len(open_)} of {len(findings)} not settled", style="bold")
    else:
        yield Text("passed: nothing got worse", style="bold green")
    yield f"{inert(document['run'], 200)} against {inert(document['against'], 200)}"
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(("setting", "quantity", "saved", "now", "change", "95 %", "allowed", "")):
        table.add_column(name, justify="left" if i in (0, 1, 7) else "right", no_wrap=True)
    for f in findings:
        table.add_row(*_cells(f), style=_STYLES.get(f["word"], ""))
    yield table
    for f in findings:
        if f["reason"]:
            yield f"{inert(f['setting'], 40)}, {_NAMES[f['quantity']]}: {inert(f['reason'], 200)}"
    methods = sorted(
        {f"{f['ratio']['method']}, {f['ratio']['n']} {f['ratio']['unit']}s" for f in findings if f["ratio"]}
    )
    yield f"How sure: {'; '.join(methods)}. Worse means that all of the interval lies beyond what is allowed."


def _said(finding: Mapping[str, Any]) -> str:
    change = 100 * (finding["ratio"]["point"] - 1)
    return (
        f"{_NAMES[finding['quantity']]} of {inert(finding['setting'], 40)} went from {finding['before']:.3f} to "
        f"{finding['after']:.3f} {finding['unit']} ({change:+.1f} %)"
    )


def _cells(finding: Mapping[str, Any]) -> list[str]:
    ratio = finding["ratio"]
    bad = "-" if finding["quantity"] == "accept_length" else "+"
    interval = "-"
    if ratio and ratio["low"] is not None and ratio["high"] is not None:
        interval = f"[{100 * (ratio['low'] - 1):+.1f}, {100 * (ratio['high'] - 1):+.1f}]"
    return [
        inert(finding["setting"], 40),
        _NAMES[finding["quantity"]],
        "-" if finding["before"] is None else f"{finding['before']:.3f}",
        "-" if finding["after"] is None else f"{finding['after']:.3f}",
        f"{100 * (ratio['point'] - 1):+.1f} %" if ratio else "-",
        interval,
        f"{bad}{100 * finding['threshold']:g} %",
        finding["word"],
    ]
