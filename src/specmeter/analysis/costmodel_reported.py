"""The document of ``specmeter explain --figures``: break-even of every line, predictions and contradictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specmeter import __version__
from specmeter.analysis.costmodel_figures import Line, Series, predict_series, slope_ms
from specmeter.analysis.costmodel_story import check_story
from specmeter.analysis.moe import distinct_experts

SCHEMA = "specmeter/figures/1"


def explain_figures(title: str, series: Sequence[Series]) -> dict[str, Any]:
    """The document: one entry a series, each with its lines, and where asked predictions and a story."""
    head = {"schema": SCHEMA, "kind": "figures", "version": __version__}
    return {**head, "title": title, "series": [_series(s) for s in series]}


def _series(series: Series) -> dict[str, Any]:
    told = series.verify_ms is not None and series.verify_share is not None
    return {
        "name": series.name,
        "baseline_ms": series.baseline_ms,
        "slope_ms": slope_ms(series),
        "lines": [_line(line, series) for line in series.lines],
        "fit": list(series.fit),
        "predicted": [asdict(p) for p in predict_series(series)] if series.fit else [],
        "story": asdict(check_story(series)) if told else None,
    }


def _line(line: Line, series: Series) -> dict[str, Any]:
    """Break-even = cycle / baseline step, speed-up = accept length / break-even = tok/s over the baseline's."""
    base = series.baseline_ms
    even = line.cycle_ms / base if line.cycle_ms is not None and base is not None else None
    phases = dict(line.phases_ms)
    if phases and line.cycle_ms is not None:
        phases["in no named phase"] = line.cycle_ms - sum(phases.values())
    return {
        "label": line.label,
        "steps": line.steps,
        "width": line.width,
        "accept_length_tokens": line.accept_length,
        "tokens_per_s": line.tok_s,
        "cycle_ms": line.cycle_ms,
        "break_even_tokens": even,
        "speedup": line.tok_s * base / 1000 if line.tok_s is not None and base is not None else None,
        "reason": _why_not(line, base) if even is None else "",
        "phases_ms": phases,
        "distinct_experts": distinct_experts(series.experts, line.width) if series.experts else None,
    }


def _why_not(line: Line, base: float | None) -> str:
    lacking = [what for what, value in (("a baseline", base), ("a cycle", line.cycle_ms)) if value is None]
    return f"{' and '.join(lacking)} was not reported"
