"""The section of a comparison across server starts: ratios with intervals, and every start's rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmeter.reporters.html.charts import axis, draw, label, names_axis
from specmeter.reporters.html.markup import Section, beside, figure, paragraph, table
from specmeter.reporters.numbers import bounds, plus_minus, point, span, units

Document = Mapping[str, Any]


def compare_sections(document: Document, prefix: str = "", title: str = "Arms across server starts") -> list[Section]:
    """The sections of a document of kind ``compare``."""
    section = Section(title, f"{prefix}compare")
    parts = []
    if any(row["ratio"] for row in document["pairs"]):
        note = f"Speed against {document['reference']}, with the 95 % interval. Dashed: equal speed."
        parts.append(figure(ratio_chart(document), "Ratio to the reference", note))
    if any(arm["start_rates_tok_s"] for arm in document["arms"]):
        note = "A dot a server start: starts of equal settings differ, so the start is the unit."
        parts.append(figure(starts_chart(document), "Every start", note))
    section.add(beside(*parts), _table(document))
    for row in document["pairs"]:
        if row["reason"]:
            section.add(paragraph(f"{row['arm']}: {row['reason']}."))
    limit = 100 * document["threshold"]
    return [section.add(paragraph(f"A verdict needs the whole interval of the ratio beyond {limit:g} %."))]


def ratio_chart(document: Document) -> str:
    """A dot and its interval for each pair, and the line of equal speed."""
    rows = []
    for row in document["pairs"]:
        if row["ratio"]:
            at = row["ratio"]["point"]
            low, high = bounds(row["ratio"]) or (at, at)
            text = f"{row['arm']}: x {at:.3f}{plus_minus(row['ratio'])}, {row['verdict']}"
            rows.append({"arm": row["arm"], "at": at, "low": low, "high": high, "label": text})
    y = {"field": "arm", "type": "nominal", "sort": None, "axis": names_axis(None, [row["arm"] for row in rows])}
    x = {"field": "at", "type": "quantitative", "scale": {"zero": False}, "axis": axis("ratio of speeds")}
    line = {"values": [{"at": 1, "label": "equal speed"}]}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "rule", "strokeWidth": 2, "color": "var(--s0)", "aria": False},
            "encoding": {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "color": "var(--s0)"},
            "encoding": {"y": y, "x": x, "description": label()},
        },
        {
            "data": line,
            "mark": {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 2},
            "encoding": {"x": {"field": "at", "type": "quantitative"}, "description": label()},
        },
    ]
    return draw({"layer": layers, "height": {"step": 30}}, rows)


def starts_chart(document: Document) -> str:
    """Every start's decode rate, by arm."""
    rows = [
        {"arm": arm["name"], "rate": rate, "label": f"{arm['name']}, start {i + 1}: {rate:.1f} tok/s"}
        for arm in document["arms"]
        for i, rate in enumerate(arm["start_rates_tok_s"])
    ]
    names = [arm["name"] for arm in document["arms"]]
    return draw(
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1, "color": "var(--s1)"},
            "height": {"step": 30},
            "encoding": {
                "y": {"field": "arm", "type": "nominal", "sort": None, "axis": names_axis(None, names)},
                "x": {"field": "rate", "type": "quantitative", "scale": {"zero": False}, "axis": axis("tok/s")},
                "description": label(),
            },
        },
        rows,
    )


def _table(document: Document) -> str:
    pairs = {row["arm"]: row for row in document["pairs"]}
    rows = []
    for arm in document["arms"]:
        row = pairs.get(arm["name"])
        ratio = row["ratio"] if row else None
        rows.append(
            (
                arm["name"], arm["starts"], point(arm["tokens_per_s"], 1), point(ratio), span(ratio),
                units(ratio["n"], ratio["unit"]) if ratio else "-", row["verdict"] if row else "reference",
            )
        )  # fmt: skip
    columns = ("arm", "starts", "tok/s", f"x {document['reference']}", "95 % interval", "over", "verdict")
    return table(columns, rows, "Every arm", (0, 6))
