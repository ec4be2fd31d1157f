"""The ranks of a profile as text: a row each, the straggler, and how far apart they come to their collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.inert import inert
from specmeter.reporters.language import heading, make_table, remark
from specmeter.reporters.numbers import number

# Of more ranks than this the fastest and the slowest are shown; all are in the JSON.
MOST_RANKS = 16


def ranks_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The section on ranks; nothing for a single one."""
    if not document["ranks"]:
        return
    yield heading("Ranks (mean ms a cycle)")
    yield _rank_table(document, width)
    for line in rank_lines(document):
        yield remark(line)


def rank_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Who is waited for, how far apart the ranks come, how their clocks were joined, and what is missing."""
    yield from _straggler(document)
    yield from _skew(document.get("rank_skew"))


def telling(rows: list[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """All rows if they are few, else those with the least and the most of ``key``, in their order."""
    if len(rows) <= MOST_RANKS:
        return rows
    ordered = sorted(rows, key=lambda row: row[key] or 0.0)
    half = MOST_RANKS // 2
    picked = {id(row) for row in [*ordered[:half], *ordered[-half:]]}
    return [row for row in rows if id(row) in picked]


def _rank_table(document: Mapping[str, Any], width: int) -> Table:
    rows = document["ranks"]
    collective = any(rank.get("collectives_ms") for rank in rows)
    extra = ["own work", "collectives"] if collective else []
    phases = [row["name"] for row in document["phases"]]
    room = width - 30 - 12 * len(extra)
    shown = phases if room >= 10 * len(phases) else phases[: max(1, room // 10)]
    table = make_table(["rank", "cycle", *extra, *shown])
    picked = telling(rows, "own_ms" if collective else "cycle_ms")
    for rank in picked:
        values = [rank["phases_ms"].get(phase, 0.0) for phase in shown]
        if collective:
            values = [rank["own_ms"], sum(rank["collectives_ms"].values()), *values]
        name = f"{rank['rank']} on {inert(rank['host'], 20)}"
        table.add_row(name, number(rank["cycle_ms"]), *(number(value) for value in values))
    if len(picked) < len(rows):
        table.add_row(f"and {len(rows) - len(picked)} more", *([""] * (1 + len(extra) + len(shown))))
    return table


def _straggler(document: Mapping[str, Any]) -> Iterator[str]:
    found = document.get("straggler")
    if found is not None:
        yield (
            f"Rank {found['rank']} is the straggler: {number(found['own_ms'])} ms of own work a cycle against "
            f"{number(found['others_own_ms'])} of the others, which wait for it in the collectives."
        )
    behind = [
        f"{inert(row['phase'], 20)} rank {row['rank']} ({number(row['own_ms'])} against {number(row['others_own_ms'])})"
        for row in document.get("phase_stragglers") or []
    ]
    if behind:
        yield f"Longest by phase, ms on the host's clock: {', '.join(behind)}."


def _skew(found: Mapping[str, Any] | None) -> Iterator[str]:
    if not found:
        return
    if found["cycle_p50_ms"] is not None:
        yield (
            f"The ranks begin a cycle {number(found['cycle_p50_ms'])} ms apart (p50), {number(found['cycle_p95_ms'])} "
            f"(p95), over {found['cycles']} cycles."
        )
    for row in found["arrivals"]:
        share = max(row["last_percent"], default=0.0)
        late = found["ranks"][row["last_percent"].index(share)][1] if row["last_percent"] else "?"
        yield (
            f"{inert(row['name'], 40)}: {row['calls']:.1f} calls a cycle, ranks come {number(row['skew_p50_ms'])} ms "
            f"apart (p50), {number(row['skew_p95_ms'])} (p95); {number(row['transfer_ms'])} ms a cycle transfer, "
            f"{number(row['waiting_ms'])} waiting for the last rank, which is rank {late} in {share:.0f} %"
        )
    said: set[str] = set()
    for clock in found["clocks"]:
        if clock["source"] == "shared" or clock["host"] in said:
            continue
        said.add(clock["host"])
        bound = "" if clock["error_ns"] is None else f", off by at most {clock['error_ns'] / 1e3:.1f} us"
        yield f"Clock of {inert(clock['host'], 40)}: joined by {inert(clock['source'], 20)}{bound}."
    yield from found["notes"]
