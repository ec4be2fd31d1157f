"""Charts over settings: measured and predicted speed, accept length against break-even."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmeter.reporters.html.charts import axis, draw, label, series_colour
from specmeter.reporters.numbers import bounds, plus_minus

MEASURED, MODEL, PROFILE = "measured", "accept length / cycle", "predicted from the profile"


def predicted_rate(row: Mapping[str, Any]) -> float | None:
    """tok/s of an arm as its cycles say: accept length / cycle."""
    length, cycle = row["accept_length_tokens"], row["cycle_ms"]
    return 1000 * length["point"] / cycle["point"] if length and cycle and cycle["point"] else None


def speed_chart(document: Mapping[str, Any], profiled: Sequence[tuple[int, float]] = ()) -> str:
    """tok/s of each setting: measured with its interval, and as predicted; ``profiled`` are (steps, tok/s)."""
    rows: list[dict[str, Any]] = []
    base = next((r for r in document["arms"] if r["setting"] == document["baseline"]), None)
    for row in document["arms"]:
        speed, name = row["tokens_per_s"], row["setting"]
        if speed:
            low, high = bounds(speed) or (speed["point"], speed["point"])
            text = f"{name}: measured {speed['point']:.1f} tok/s{plus_minus(speed, 1)}"
            rows.append(_row(name, MEASURED, speed["point"], text, low, high))
        guess = predicted_rate(row)
        if guess is not None:
            rows.append(_row(name, MODEL, guess, f"{name}: accept length / cycle gives {guess:.1f} tok/s"))
        for steps, rate in profiled:
            own = row["settings"]
            if own.get("steps") == steps and own.get("topk", 1) == 1:
                rows.append(_row(name, PROFILE, rate, f"{name}: predicted from the profile {rate:.1f} tok/s"))
    names = [n for n in (MEASURED, MODEL, PROFILE) if any(row["series"] == n for row in rows)]
    x = {"field": "setting", "type": "ordinal", "sort": None, "axis": axis("setting", labelAngle=-30)}
    y = {"field": "rate", "type": "quantitative", "axis": axis("tok/s"), "scale": {"zero": False}}
    shape = {"field": "series", "scale": {"domain": names, "range": ["circle", "cross", "diamond"]}, "legend": {}}
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": f"datum.series == '{MEASURED}'"}],
            "mark": {"type": "rule", "strokeWidth": 2, "color": "var(--s0)", "aria": False},
            "encoding": {
                "x": x,
                "y": {**y, "field": "low"},
                "y2": {"field": "high"},
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": series_colour(names), "shape": shape, "description": label()},
        },
    ]
    if base and base["tokens_per_s"]:
        at = base["tokens_per_s"]["point"]
        layers.append(_line(at, f"baseline: {at:.1f} tok/s", "y"))
    return draw({"layer": layers, "height": 220}, rows)


def need_chart(document: Mapping[str, Any]) -> str:
    """Accept length of each setting beside the break-even it needs."""
    rows = []
    for row in document["arms"]:
        for series, value in (
            ("accept length", row["accept_length_tokens"]["point"] if row["accept_length_tokens"] else None),
            ("break-even", row["break_even_tokens"]),
        ):
            if value is not None:
                text = f"{row['setting']}: {series} {value:.2f} tokens"
                rows.append({"setting": row["setting"], "series": series, "tokens": value, "label": text})
    return draw(
        {
            "mark": {"type": "bar"},
            "height": 180,
            "encoding": {
                "x": {"field": "setting", "type": "ordinal", "sort": None, "axis": axis("setting", labelAngle=-30)},
                "xOffset": {"field": "series", "sort": None},
                "y": {"field": "tokens", "type": "quantitative", "axis": axis("tokens a cycle")},
                "color": series_colour(["accept length", "break-even"]),
                "description": label(),
            },
        },
        rows,
    )


def _row(name: str, series: str, rate: float, text: str, low: float | None = None, high: float | None = None) -> Any:
    return {"setting": name, "series": series, "rate": rate, "label": text, "low": low, "high": high}


def _line(at: float, text: str, channel: str) -> dict[str, Any]:
    return {
        "data": {"values": [{"at": at, "label": text}]},
        "mark": {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 2},
        "encoding": {channel: {"field": "at", "type": "quantitative"}, "description": label()},
    }
