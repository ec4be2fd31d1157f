"""Collectives of a deep window as text: their share of each phase, who serves them, and whom the ranks wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from specmeter.reporters.inert import inert
from specmeter.reporters.language import MIDDLE, NARROW, heading, make_table, remark
from specmeter.reporters.numbers import MISSING, number, plus_minus
from specmeter.reporters.ranks_view import telling


def collectives_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The section on ``document["collectives"]``; nothing where there is none."""
    found = document.get("collectives")
    if not found or not found["phases"]:
        return
    yield heading(title_of(found))
    for sentence in found["sentences"]:
        yield remark(sentence)
    yield remark(MEANING)
    for columns, rows in (phase_rows(found, width), kind_rows(found, width), rank_rows(found, width)):
        table = make_table(columns)
        for row in rows:
            table.add_row(*row)
        if rows:
            yield table
    for line in notes_of(found):
        yield remark(line)


MEANING = "of busy: of the device's busy time in the phase; alone: while the device did nothing else"
Rows = tuple[list[str], list[list[str]]]


def title_of(found: Mapping[str, Any]) -> str:
    """What the section is over."""
    return f"Communication (deep window, {found['cycles']} cycles on every rank)"


def notes_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Arrivals by phase, what was left out, and the sentences of other settings' windows."""
    if len(found["ranks"]) > 1:
        yield from _skews(found["phases"])
    yield from found["notes"]
    for other in found.get("others") or []:
        for sentence in other["sentences"]:
            yield f"{inert(other['setting'], 60)}: {sentence}"


def phase_rows(found: Mapping[str, Any], width: int) -> Rows:
    """A row for each phase: a mean cycle's calls and ms."""
    shown = ["ms", "waiting", "of busy"]
    shown = ["calls", "ms", "transfer", "waiting", "of busy"] if width >= NARROW else shown
    shown += ["alone"] if width >= MIDDLE else []
    rows = []
    for row in found["phases"]:
        cells = {
            "calls": f"{row['count']:.1f}",
            "ms": number(row["ms"]["point"]),
            "transfer": number(row["transfer_ms"]),
            "waiting": number(row["waiting_ms"]["point"] if row["waiting_ms"] else None),
            "of busy": f"{row['percent']:.1f} %",
            "alone": number(row["exposed_ms"]),
        }
        rows.append([inert(row["phase"], 20), *(cells[name] for name in shown)])
    return ["phase", *shown], rows


def kind_rows(found: Mapping[str, Any], width: int) -> Rows:
    """A row for each phase, operation and backend: the mean of one collective."""
    shown = ["us each", "waiting"]
    shown = ["calls", "us each", "transfer", "waiting"] if width >= NARROW else shown
    shown += ["bytes", "GB/s"] if width >= MIDDLE else []
    rows = []
    for row in found["kinds"]:
        cells = {
            "calls": f"{row['count']:.1f}",
            "us each": number(row["us"], 1),
            "transfer": number(row["transfer_us"], 1),
            "waiting": number(row["waiting_us"], 1),
            "bytes": MISSING if row["bytes"] is None else f"{row['bytes']:.0f}",
            "GB/s": number(row["gb_s"], 1),
        }
        name = f"{inert(row['phase'], 20)} {inert(row['operation'], 30)}, {inert(row['backend'], 40)}"
        rows.append([name, *(cells[name] for name in shown)])
    return ["collective", *shown], rows


def rank_rows(found: Mapping[str, Any], width: int) -> Rows:
    """A row for each rank, or for the telling ones of many: ms a cycle, how often it came last; none for one rank."""
    every = found["ranks"] if len(found["ranks"]) > 1 else []
    shown = telling(every, "waiting_ms")
    rows = []
    for row in shown:
        host = f" on {inert(row['host'], 20)}" if width >= NARROW else ""
        share = MISSING if row["last_percent"] is None else f"{row['last_percent']:.0f} %"
        rows.append([f"{row['rank']}{host}", number(row["ms"]), number(row["waiting_ms"]), share])
    if len(shown) < len(every):
        rows.append([f"and {len(every) - len(shown)} more", "", "", ""])
    return ["rank", "collectives, ms" if width >= NARROW else "ms", "waiting", "last"], rows


def _skews(rows: list[Mapping[str, Any]]) -> Iterator[str]:
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
        yield text
