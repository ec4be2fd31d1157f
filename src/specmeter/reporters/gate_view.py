"""The report of ``specmeter gate``: passed or failed, and each quantity with what was allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, make_table, remark, verdict_line
from specmeter.reporters.numbers import MISSING, NOTHING, bounds, number, units

_NAMES = {"accept_length": "accept length", "cycle": "cycle", "break_even": "break-even"}
_STYLES = {"worse": "red", "unsettled": "yellow", "not worse": "green"}


def gate_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report, in order; ``width`` in columns."""
    findings = document["findings"]
    yield verdict_line(*_verdict(document))
    yield remark(f"{document['run']} against {document['against']}")
    columns = ["setting", "quantity", "change", ""]
    if width >= NARROW:
        columns = ["setting", "quantity", "saved", "now", "change", "allowed", ""]
    if width >= MIDDLE:
        columns.insert(5, "95 %")
    table = make_table(columns, left=(0, 1, len(columns) - 1))
    for f in findings:
        table.add_row(*_cells(f, width), style=_STYLES.get(f["word"], ""))
    yield table
    for f in findings:
        if f["reason"]:
            yield remark(f"{inert(f['setting'], 40)}, {_NAMES[f['quantity']]}: {f['reason']}")
    ratios = [f["ratio"] for f in findings if f["ratio"]]
    methods = sorted({f"{r['method']}, {units(r['n'], r['unit'])}" for r in ratios})
    if any(r["unit"] == "prompt" for r in ratios):
        yield remark("saved, now: geometric means over the prompts of both runs; a report has means over cycles")
    yield remark(
        f"How sure: {'; '.join(methods)}. Worse means that all of the 95 % interval lies beyond what is allowed."
    )


def _verdict(document: Mapping[str, Any]) -> tuple[str, str]:
    findings = document["findings"]
    worse = [f for f in findings if f["word"] == "worse"]
    unsettled = sum(1 for f in findings if f["word"] == "unsettled")
    if worse:
        return f"FAILED: {'; '.join(_said(f) for f in worse)}", "error"
    if not document["passed"] and not unsettled:
        missing = ", ".join(inert(name, 40) for name in document.get("missing_settings") or [])
        return f"FAILED: {missing} of the saved run is missing (--settled)", "error"
    if not document["passed"]:
        return f"FAILED: {unsettled} of {len(findings)} quantities are not settled (--settled)", "error"
    if unsettled:
        return f"passed: nothing is shown to be worse; {unsettled} of {len(findings)} quantities not settled", "warning"
    return "passed: nothing got worse", "faster"


def _said(finding: Mapping[str, Any]) -> str:
    change = 100 * (finding["ratio"]["point"] - 1)
    return (
        f"{_NAMES[finding['quantity']]} of {inert(finding['setting'], 40)} went from {finding['before']:.3f} to "
        f"{finding['after']:.3f} {finding['unit']} ({change:+.1f} %)"
    )


def _cells(finding: Mapping[str, Any], width: int) -> list[str]:
    ratio, ends = finding["ratio"], bounds(finding["ratio"])
    change = f"{100 * (ratio['point'] - 1):+.1f} %" if ratio else MISSING
    cells = [inert(finding["setting"], 40), _NAMES[finding["quantity"]]]
    if width < NARROW:
        return [*cells, change, finding["word"]]
    cells += [number(finding["before"]), number(finding["after"]), change]
    if width >= MIDDLE:
        none = NOTHING if ratio else MISSING
        cells.append(f"[{100 * (ends[0] - 1):+.1f}, {100 * (ends[1] - 1):+.1f}]" if ends else none)
    bad = "-" if finding["quantity"] == "accept_length" else "+"
    return [*cells, f"{bad}{100 * finding['threshold']:g} %", finding["word"]]
