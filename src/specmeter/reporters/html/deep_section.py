"""The page's section on ``document["deep"]``: what each deep window cost, and which kernels took the time, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmeter.analysis.kernel_classes import CLASSES, classes_of
from specmeter.reporters.deep_view import LEAST_PERCENT, cost_words
from specmeter.reporters.device_rows import title_of
from specmeter.reporters.html.markup import Section, paragraph, table

Document = Mapping[str, Any]
PLAIN = "baseline"
COLUMNS = ("phase", "class", "name", "ms", "share", "calls")


def deep_sections(document: Document, prefix: str = "") -> list[Section]:
    """One section over all windows; the tables are the lowest rank's of each setting. None without windows."""
    windows = document.get("deep") or []
    if not windows:
        return []
    section = Section("Deep window: its cost, and what ran", f"{prefix}deep")
    first: dict[str, Document] = {}
    for window in windows:
        section.add(paragraph(cost_words(window)))
        if window["setting"] not in first:
            first[window["setting"]] = window
            section.add(*(paragraph(note, "note") for note in window["notes"]), _longest(window))
    return [section.add(_beside_plain(first))]


def _longest(window: Document) -> str:
    """The longest kernels of each phase with their classes, by name alone: an lm_head is a GEMM here."""
    listed = [row for row in window["top"] if row["percent"] >= LEAST_PERCENT]
    if not listed:
        return ""
    classes = [title_of(CLASSES[code]) for code in classes_of([row["name"] for row in listed]).tolist()]
    rows = [
        (row["phase"], kind, row["name"], f"{row['ms']:.3f}", f"{row['percent']:.1f} %", f"{row['calls']:.1f}")
        for row, kind in zip(listed, classes, strict=True)
    ]
    of = f" of {window['setting']}" if window["setting"] else ""
    return table(COLUMNS, rows, f"Longest {_what(window)}{of}, own time a cycle", (0, 1, 2))


def _beside_plain(first: Mapping[str, Document]) -> str:
    """Verify's longest kernels by class beside a plain step's, where both have a window; else nothing."""
    plain = first.get(PLAIN)
    speculative = next((window for setting, window in first.items() if setting != PLAIN), None)
    if plain is None or speculative is None:
        return ""
    sides = [_verify_ms(speculative), _verify_ms(plain)]
    if not all(sides):
        return ""
    names = sorted({*sides[0], *sides[1]}, key=lambda name: -sides[0].get(name, 0.0))
    rows: list[tuple[str, ...]] = [
        (name, *(f"{side[name]:.3f}" if name in side else "-" for side in sides)) for name in names
    ]
    rows.append(("all of these", *(f"{sum(side.values()):.3f}" for side in sides)))
    title = f"Verify against a decode step without speculation, longest {_what(plain)}, ms a cycle"
    return table(("class", "verify", "plain step"), rows, title)


def _verify_ms(window: Document) -> dict[str, float]:
    """ms a cycle of the listed kernels of verify by class; a plain step's forward is named verify too."""
    found: dict[str, float] = {}
    rows = [row for row in window["top"] if row["phase"] == "verify"]
    for row, code in zip(rows, classes_of([row["name"] for row in rows]).tolist(), strict=True):
        name = title_of(CLASSES[code])
        found[name] = found.get(name, 0.0) + row["ms"]
    return found


def _what(window: Document) -> str:
    return "operators on the host" if window["on_cpu"] else "kernels"
