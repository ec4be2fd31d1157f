"""Charts of the mean cycle: against the baseline, what verify is made of, how its phases spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmeter.reporters.html.charts import axis, draw, label, names_axis, phase_colour, series_colour
from specmeter.reporters.html.facts import Floats, histogram
from specmeter.reporters.profile_view import cycle_shares

Rows = list[dict[str, Any]]
Document = Mapping[str, Any]


def cycle_chart(document: Document) -> str:
    """The mean cycle as a stacked bar, a baseline step below it, and the break-even line."""
    mean = document["cycle"]["mean_ms"]["point"]
    base, even = document["baseline"]["step_ms"], document["acceptance"]["length_tokens"]
    rows, at = [], 0.0
    for name, share in cycle_shares(document):
        ms = share * mean
        if ms > 0:
            text = f"{name}: {ms:.3f} ms, {100 * share:.1f} % of the cycle"
            rows.append({"bar": "cycle", "phase": name, "from": at, "to": at + ms, "label": text})
        at += ms
    bars: Any = {
        "transform": [{"filter": "datum.kind != 'line'"}],
        "mark": {"type": "bar", "stroke": "var(--bg)", "strokeWidth": 0.5},
        "encoding": {
            "y": {"field": "bar", "type": "nominal", "axis": names_axis(None, ["baseline step"]), "sort": None},
            "x": {"field": "from", "type": "quantitative", "axis": axis("ms")},
            "x2": {"field": "to"},
            "color": phase_colour([row["phase"] for row in rows]),
            "description": label(),
        },
    }
    layers = [bars]
    if base is not None:
        text = f"baseline step: {base['point']:.3f} ms"
        rows.append({"bar": "baseline step", "phase": "base", "from": 0, "to": base["point"], "label": text})
        scale = bars["encoding"]["color"]["scale"]
        scale["domain"], scale["range"] = [*scale["domain"], "base"], [*scale["range"], "var(--base)"]
        bars["encoding"]["color"]["legend"] = {"values": scale["domain"][:-1]}
    if base is not None and even is not None:
        ms = base["point"] * even["point"]
        text = f"break-even: {ms:.3f} ms, what plain decoding takes for {even['point']:.2f} tokens"
        rows.append({"kind": "line", "from": ms, "label": text, "text": f"break-even {ms:.2f} ms"})
        line = {"transform": [{"filter": "datum.kind == 'line'"}]}
        x = {"field": "from", "type": "quantitative"}
        mark = {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 2}
        layers.append({**line, "mark": mark, "encoding": {"x": x, "description": label()}})
        words = {"type": "text", "aria": False, "dy": -6, "y": 0, "align": "right", "baseline": "bottom"}
        layers.append({**line, "mark": words, "encoding": {"x": x, "text": {"field": "text"}}})
    return draw({"layer": layers, "height": {"step": 44}}, rows)


def parts_chart(verify: Sequence[Mapping[str, Any]], plain: Sequence[tuple[str, float]], step_ms: float | None) -> str:
    """What verify is made of beside a decode step: ``verify`` are points of the analysis, ``plain`` (point, ms)."""
    rows: Rows = []
    at = 0.0
    names: list[str] = []
    bars = [("verify", [(row["name"], row["ms"]) for row in verify]), ("baseline step", list(plain))]
    for bar, parts in bars:
        at = 0.0
        for name, ms in parts:
            if name not in names:
                names.append(name)
            text = f"{name} in {bar}: {ms:.3f} ms"
            rows.append({"bar": bar, "series": name, "from": at, "to": at + ms, "label": text})
            at += ms
        if bar != "verify" and step_ms is not None and step_ms > at:
            text = f"rest of the baseline step: {step_ms - at:.3f} ms"
            rows.append({"bar": bar, "series": "rest", "from": at, "to": step_ms, "label": text})
            names.append("rest")
    return draw(
        {
            "mark": {"type": "bar", "stroke": "var(--bg)", "strokeWidth": 0.5},
            "height": {"step": 36},
            "encoding": {
                "y": {"field": "bar", "type": "nominal", "axis": names_axis(None, ["baseline step"]), "sort": None},
                "x": {"field": "from", "type": "quantitative", "axis": axis("ms")},
                "x2": {"field": "to"},
                "color": series_colour(names),
                "description": label(),
            },
        },
        rows,
    )


def spread_charts(phases: Mapping[str, Floats]) -> str:
    """A small histogram for each phase, each on its own scale, ``phases`` in ms a cycle."""
    return draw(
        {
            "concat": [_spread(name, values) for name, values in phases.items()],
            "columns": 3,
            "spacing": 24,
            "resolve": {"scale": {"x": "independent", "y": "independent", "color": "independent"}},
        }
    )


def _spread(name: str, values: Floats) -> dict[str, Any]:
    found = histogram(values)
    width = (found.high - found.low) / len(found.counts)
    rows = [
        {
            "from": found.low + i * width,
            "to": found.low + (i + 1) * width,
            "count": int(count),
            "label": f"{name}: {count} cycles from {found.low + i * width:.3f} to {found.low + (i + 1) * width:.3f} ms",
        }
        for i, count in enumerate(found.counts.tolist())
        if count
    ]
    colour = "var(--base)" if name == "cycle" else f"var(--p-{name})"
    return {
        "title": name,
        "width": 150,
        "height": 64,
        "data": {"values": rows},
        "mark": {"type": "bar", "color": colour},
        "encoding": {
            "x": {
                "field": "from", "type": "quantitative", "scale": {"zero": False, "nice": False},
                "axis": axis("ms", tickCount=3, grid=False),
            },
            "x2": {"field": "to"},
            "y": {"field": "count", "type": "quantitative", "axis": axis(None, tickCount=2)},
            "y2": {"datum": 0},
            "description": label(),
        },
    }  # fmt: skip
