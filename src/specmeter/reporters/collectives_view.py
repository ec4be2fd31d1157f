"""Collectives of a deep window as text: their share of each phase, who serves them, and whom the ranks wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, heading, make_table, remark
from specmeter.reporters.numbers import MISSING, number, plus_minus
from specmeter.reporters.ranks_view import telling


def collectives_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The section on ``document["collectives"]``; nothing where there is none."""
    found = document.get("collectives")
    if not found or not found["phases"]:
        return
    yield heading(f"Communication (deep window, {found['cycles']} cycles on every rank)")
    for sentence in found["sentences"]:
        yield remark(sentence)
    yield remark("of busy: of the device's busy time in the phase; alone: while the device did nothing else")
    yield _phases(found["phases"], width)
    yield _kinds(found["kinds"], width)
    if len(found["ranks"]) > 1:
        yield _ranks(found["ranks"], width)
        yield from _skews(found["phases"])
    for note in found["notes"]:
        yield remark(note)
    for other in found.get("others") or []:
        for sentence in other["sentences"]:
            yield remark(f"{inert(other['setting'], 60)}: {sentence}")


def _phases(rows: list[Mapping[str, Any]], width: int) -> Table:
    shown = ["ms", "waiting", "of busy"]
    shown = ["calls", "ms", "transfer", "waiting", "of busy"] if width >= NARROW else shown
    shown += ["alone"] if width >= MIDDLE else []
    table = make_table(["phase", *shown])
    for row in rows:
        cells = {
            "calls": f"{row['count']:.1f}",
            "ms": number(row["ms"]["point"]),
            "transfer": number(row["transfer_ms"]),
            "waiting": number(row["waiting_ms"]["point"] if row["waiting_ms"] else None),
            "of busy": f"{row['percent']:.1f} %",
            "alone": number(row["exposed_ms"]),
        }
        table.add_row(inert(row["phase"], 20), *(cells[name] for name in shown))
    return table


def _kinds(rows: list[Mapping[str, Any]], width: int) -> Table:
    shown = ["us each", "waiting"]
    shown = ["calls", "us each", "transfer", "waiting"] if width >= NARROW else shown
    shown += ["bytes", "GB/s"] if width >= MIDDLE else []
    table = make_table(["collective", *shown])
    for row in rows:
        cells = {
            "calls": f"{row['count']:.1f}",
            "us each": number(row["us"], 1),
            "transfer": number(row["transfer_us"], 1),
            "waiting": number(row["waiting_us"], 1),
            "bytes": MISSING if row["bytes"] is None else f"{row['bytes']:.0f}",
            "GB/s": number(row["gb_s"], 1),
        }
        name = f"{inert(row['phase'], 20)} {inert(row['operation'], 30)}, {inert(row['backend'], 40)}"
        table.add_row(name, *(cells[name] for name in shown))
    return table


def _ranks(rows: list[Mapping[str, Any]], width: int) -> Table:
    table = make_table(["rank", "collectives, ms" if width >= NARROW else "ms", "waiting", "last"])
    shown = telling(rows, "waiting_ms")
    for row in shown:
        host = f" on {inert(row['host'], 20)}" if width >= NARROW else ""
        share = MISSING if row["last_percent"] is None else f"{row['last_percent']:.0f} %"
        table.add_row(f"{row['rank']}{host}", number(row["ms"]), number(row["waiting_ms"]), share)
    if len(shown) < len(rows):
        table.add_row(f"and {len(rows) - len(shown)} more", "", "", "")
    return table


def _skews(rows: list[Mapping[str, Any]]) -> Iterator[RenderableType]:
    for row in rows:
        skew, late = row["skew_us"], row["straggler"]
        if not skew:
            continue
        text = f"Arrivals at a collective of {inert(row['phase'], 20)} lie {skew['p50']:.1f} us apart (p50), "
        text += f"{skew['p95']:.1f} (p95), {skew['most']:.1f} (most)"
        if late:
            text += f"; rank {late['rank']} is last in {late['percent']:.0f} %, {number(late['behind_ms'])} ms a cycle"
            text += " after the others"
        if row["waiting_ms"]:
            text += f"; waiting {number(row['waiting_ms']['point'])} ms{plus_minus(row['waiting_ms'])}"
        yield remark(text)
