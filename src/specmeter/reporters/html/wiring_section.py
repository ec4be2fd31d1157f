"""Wiring drawn as layers and taps: which states of the target each engine feeds, and which the head was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmeter.reporters.check_words import check_sentence, states
from specmeter.reporters.html.charts import WIDTH, axis, draw, label
from specmeter.reporters.html.markup import Section, beside, figure, paragraph, table

Document = Mapping[str, Any]
MOST_FEEDS = 6
MOST_LAYERS = 1000


def wiring_sections(document: Document) -> list[Section]:
    """The section of a check's result."""
    section = Section("Wiring", "wiring").add(paragraph(check_sentence(document)))
    note = (
        "A column a reader, a row a hidden state of the target: H[0] is the embedding output, H[k] the output of "
        "decoder layer k-1. A filled dot is a state that goes into the head."
    )
    chart = figure(wiring_chart(document), "Layers and taps", note)
    rows = [
        (
            reader_name(feed),
            f"cannot start: {feed['refusal']}" if feed["refusal"] else states(feed["states"]),
            feed["key_read"] or "no ids: default layers",
        )
        for feed in document["feeds"]
    ]
    rows.insert(0, ("trained on", states(document["trained"]["states"]), document["trained"]["reason"]))
    section.add(beside(chart, table(("reader", "states", "why"), rows, "States that are fed", (0, 1, 2))))
    if document["findings"]:
        found = [(f["severity"], f["what"], f["cause"], f["cure"]) for f in document["findings"]]
        section.add(table(("severity", "finding", "why", "cure"), found, "Findings", (0, 1, 2, 3)))
    return [section]


def reader_name(feed: Document) -> str:
    """Engine, release and, where a release has several, the reader: ``vllm 0.33.0, model runner V2``."""
    name = f"{feed['engine']} {feed['engine_version'] or ''}".strip()
    return f"{name}, {feed['reader']}" if feed.get("reader") else name


def wiring_chart(document: Document) -> str:
    """Dots for fed states over a ladder of all states of the target."""
    trained = document["trained"]["states"]
    readers: list[tuple[str, list[int] | None]] = [("trained on", trained)]
    for feed in document["feeds"][:MOST_FEEDS]:
        readers.append((reader_name(feed), feed["states"]))
    layers = int(document["target_layers"])
    if not 0 < layers <= MOST_LAYERS:
        raise ValueError(f"{layers} layers")
    rows: list[dict[str, Any]] = []
    for name, tapped in readers:
        for state in range(layers + 1):
            fed = tapped is not None and state in tapped
            wrong = fed and trained is not None and state not in trained
            kind = "wrong" if wrong else "fed" if fed else "not fed"
            said = f"{name}: H[{state}] {'fed, but not what the head was trained on' if wrong else kind}"
            rows.append(
                {"reader": name, "state": state, "kind": kind, "label": said, "text": f"H[{state}]" if fed else ""}
            )
    colour = {
        "field": "kind", "type": "nominal",
        "legend": {},
        "scale": {"domain": ["fed", "wrong", "not fed"], "range": ["var(--s0)", "var(--bad)", "var(--line)"]},
    }  # fmt: skip
    room = WIDTH / len(readers) - 8
    x = {
        "field": "reader",
        "type": "nominal",
        "sort": None,
        "axis": axis(None, labelAngle=0, labelLimit=room, labelExpr="split(datum.label, ', ')"),
    }
    y = {"field": "state", "type": "quantitative", "scale": {"domain": [-0.5, layers + 0.5], "nice": False},
         "axis": axis("H[k]", grid=False)}  # fmt: skip
    dots = {"type": "point", "filled": True, "opacity": 1}
    size = {"condition": {"test": "datum.kind == 'not fed'", "value": 14}, "value": 130}
    return draw(
        {
            "height": max(220, min(9 * layers, 560)),
            "layer": [
                {
                    "mark": dots,
                    "encoding": {"x": x, "y": y, "color": colour, "size": size, "description": label()},
                },
                {
                    "mark": {"type": "text", "align": "left", "dx": 10, "aria": False},
                    "encoding": {"x": x, "y": y, "text": {"field": "text"}},
                },
            ],
        },
        rows,
    )
