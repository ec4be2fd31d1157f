"""The page's parts on ranks: a row each, who is waited for, and the section on collectives of deep windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmeter.reporters import collectives_view as view
from specmeter.reporters.html.facts import Cycles
from specmeter.reporters.html.markup import Section, paragraph, table
from specmeter.reporters.numbers import number
from specmeter.reporters.ranks_view import rank_lines

Document = Mapping[str, Any]
WIDE = 120


def collective_sections(document: Document, prefix: str = "") -> list[Section]:
    """The section on communication; none where no window saw any."""
    found = document.get("collectives")
    if not found or not found["phases"]:
        return []
    section = Section(view.title_of(found), f"{prefix}communication")
    section.add(*(paragraph(sentence) for sentence in found["sentences"]), paragraph(view.MEANING))
    captions = ("Collectives by phase, ms a cycle", "One collective, by phase, operation and backend", "By rank")
    parts = (view.phase_rows(found, WIDE), view.kind_rows(found, WIDE), view.rank_rows(found, WIDE))
    for caption, (columns, rows) in zip(captions, parts, strict=True):
        section.add(table(columns, rows, caption) if rows else "")
    return [section.add(*(paragraph(line) for line in view.notes_of(found)))]


def rank_parts(document: Document, ranks: Sequence[Cycles]) -> list[str]:
    """What there is to say of the ranks, with a table where there are several."""
    parts = []
    numbers = [r.rank.rank for r in ranks if r.rank.rank >= 0]
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    if missing:
        names = ", ".join(str(n) for n in missing)
        parts.append(paragraph(f"Rank {names} left no record: its part of the work is not in this report.", "note"))
    if document["ranks"]:
        phases = [row["name"] for row in document["phases"]]
        rows = [
            (f"rank {r['rank']} on {r['host']}", r["cycles"], number(r["cycle_ms"]),
             *(number(r["phases_ms"].get(p, 0.0)) for p in phases))
            for r in document["ranks"]
        ]  # fmt: skip
        parts.append(table(("rank", "cycles", "cycle", *phases), rows, "Ranks, mean ms a cycle"))
        parts += [paragraph(line) for line in rank_lines(document)]
    return parts
