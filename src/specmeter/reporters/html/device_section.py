"""The page's section on device time: phases, what verify is made of, where idle time comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmeter.reporters import device_rows as rows
from specmeter.reporters.html.charts import axis, draw, label, names_axis, series_colour
from specmeter.reporters.html.markup import Section, beside, details, figure, paragraph, table

Document = Mapping[str, Any]
# The page has eight colours for series; the classes beyond the longest seven are drawn together.
MOST_CLASSES = 7


def device_sections(document: Document, prefix: str = "") -> list[Section]:
    """The sections on deep windows; none where the run has no window."""
    windows = (document.get("device") or {}).get("windows") or []
    sections = [_window(windows[0], windows[1:], prefix)] if windows else []
    found = document.get("verify_width")
    if found:
        section = Section("Verify against a plain step", f"{prefix}width").add(paragraph(found["sentence"]))
        if found["classes"]:
            columns, listed = rows.width_rows(found)
            what = "operators of the host" if found["on_cpu"] else "the device"
            section.add(_bars(_sides(found), f"ms of {what}", "Verify and a plain step by class"))
            section.add(table(columns, listed, f"Mean ms a cycle of {what}", (0, 6)))
        for other in found["others"]:
            section.add(paragraph(f"{other['setting'] or 'another window'}: {other['sentence']}"))
        sections.append(section)
    return sections


def _window(window: Document, others: Sequence[Document], prefix: str) -> Section:
    section = Section(rows.heading_of(window), f"{prefix}device")
    if window["verdict"]:
        section.add(paragraph(window["verdict"]["sentence"]))
    if window["reason"]:
        section.add(paragraph(f"No device times: {window['reason']}.", "note"))
    section.add(*(paragraph(note, "note") for note in window["notes"]))
    if not window["cycles"]:
        return section
    if window["verdict"]:
        section.add(paragraph(rows.facts_line(window)))
        section.add(paragraph(rows.cost_line(window)) if rows.cost_line(window) else "")
        columns, listed = rows.phase_rows(window)
        section.add(table(columns, listed, "Phases on the device, ms a cycle", (0, 8, 9)))
    columns, listed = rows.class_rows(window)
    what = "operators on the host" if window["on_cpu"] else "kernels"
    parts = table(columns, listed, f"Classes of {what} by phase, ms a cycle")
    section.add(beside(_bars(_phases(window), f"ms of {what}", "What runs in each phase"), parts))
    if window["verdict"]:
        section.add(*_details(window))
    section.add(*(paragraph(line) for line in rows.other_cycles(window)))
    return section.add(*(paragraph(rows.other_window(other)) for other in others))


def _details(window: Document) -> list[str]:
    parts = []
    if window["draft_steps"]:
        parts.append(table(*rows.step_rows(window), "Draft steps inside the graph", (0, 1)))
    if window["idle"]["rows"]:
        parts.append(table(*rows.idle_rows(window), "Why the device is idle, ms a cycle", (0, 1, 2)))
    parts.append(details("Graph hits", table(*rows.graph_rows(window), "Cycles by phase and batch", (0, 4))))
    if window["unknown"]:
        parts.append(details("Kernels of no known class", table(*rows.name_rows(window["unknown"]), "By time")))
    return parts


def _phases(window: Document) -> dict[str, dict[str, float]]:
    """ms of each class by phase, without what is too short to see."""
    bars: dict[str, dict[str, float]] = {}
    for row in window["classes"]:
        if row["phase"] in rows.SHOWN:
            bars.setdefault(row["phase"], {})[rows.title_of(row["class"])] = row["ms"]
    return {phase: bars[phase] for phase in rows.SHOWN if phase in bars}


def _sides(found: Document) -> dict[str, dict[str, float]]:
    titles = {row["class"]: rows.title_of(row["class"]) for row in found["classes"]}
    sides = {
        name: {titles[row["class"]]: row[key] for row in found["classes"]}
        for name, key in (("verify", "verify_ms"), ("plain step", "plain_ms"))
    }
    for name, key in (("verify", "verify_ms"), ("plain step", "plain_ms")):
        sides[name]["idle"] = found["idle"][key]
    return sides


def _bars(bars: Mapping[str, Mapping[str, float]], unit: str, title: str) -> str:
    """Stacked bars, one a key, of named parts in ms."""
    totals: dict[str, float] = {}
    for parts in bars.values():
        for name, ms in parts.items():
            totals[name] = totals.get(name, 0.0) + ms
    names = sorted(totals, key=lambda name: -totals[name])
    kept = names if len(names) <= MOST_CLASSES + 1 else names[:MOST_CLASSES]
    marks = []
    for bar, parts in bars.items():
        at = 0.0
        shown = {name: parts.get(name, 0.0) for name in kept}
        if len(kept) < len(names):
            shown["all others"] = sum(ms for name, ms in parts.items() if name not in kept)
        for name, ms in shown.items():
            if ms > 0:
                words = f"{name} in {bar}: {ms:.3f} ms"
                marks.append({"bar": bar, "series": name, "from": at, "to": at + ms, "label": words})
            at += ms
    series = [*kept, *(["all others"] if len(kept) < len(names) else [])]
    spec = {
        "mark": {"type": "bar", "stroke": "var(--bg)", "strokeWidth": 0.5},
        "height": {"step": 36},
        "encoding": {
            "y": {"field": "bar", "type": "nominal", "axis": names_axis(None, list(bars)), "sort": None},
            "x": {"field": "from", "type": "quantitative", "axis": axis(unit)},
            "x2": {"field": "to"},
            "color": series_colour(series),
            "description": label(),
        },
    }
    return figure(draw(spec, marks), title) if marks else ""
