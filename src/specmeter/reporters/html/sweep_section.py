"""The sections of a sweep: every setting against the baseline, measured and predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmeter.reporters.html import speed_charts
from specmeter.reporters.html.markup import Section, beside, cards, figure, paragraph, table
from specmeter.reporters.html.prediction import predict
from specmeter.reporters.numbers import mostly_stalled, number, point, span, stalled_line, units
from specmeter.trace.rundir import Run

Document = Mapping[str, Any]


def sweep_figures(document: Document) -> str:
    """The winner's numbers."""
    best = next((row for row in document["arms"] if row["setting"] == document["best"]), None)
    base = next((row for row in document["arms"] if row["setting"] == document["baseline"]), None)
    facts = []
    if best is not None:
        speed, ratio = best["tokens_per_s"], best["ratio"]
        facts.append(("Fastest", best["setting"], f"{point(speed, 1)} tok/s, 95 % {span(speed, 1)}"))
        if ratio:
            below = f"95 % {span(ratio)}, {units(ratio['n'], ratio['unit'])}"
            facts.append((f"Against {_reference(document)}", f"{point(ratio)} x", below))
    if base is not None:
        speed = base["tokens_per_s"]
        facts.append(
            (
                _reference(document).removeprefix("the ").capitalize(),
                f"{point(speed, 1)} tok/s",
                f"95 % {span(speed, 1)}",
            )
        )
    stalls = [(row["setting"], mostly_stalled(row.get("stalled"))) for row in document["arms"]]
    return "".join(paragraph(f"{name}: {said}", "note") for name, said in stalls if said) + cards(facts)


def _reference(document: Document) -> str:
    """What the ratios are against."""
    name = document["baseline"]
    return "the baseline" if name in (None, "baseline") else str(name)


def sweep_sections(document: Document, profiles: Mapping[str, Run], prefix: str = "") -> list[Section]:
    """The sections of a document of kind ``sweep``; ``profiles`` are those of the same run, to predict from."""
    section = Section("Settings against the baseline", f"{prefix}sweep")
    profile = next(iter(profiles.values()), None)
    predicted, how = predict(profile) if profile is not None else ([], "")
    profiled = [(one.steps, one.rate) for one in predicted]
    note = (
        "Measured: decode rate of the requests, with its 95 % interval. Accept length / cycle: what the cycles of the "
        "setting itself say. Dashed: baseline."
    )
    if profiled:
        note += f" Predicted from the profile: {how}."
    chart = figure(speed_charts.speed_chart(document, profiled), "Predicted against measured speed", note)
    need = ""
    if any(row["accept_length_tokens"] for row in document["arms"]):
        need = figure(speed_charts.need_chart(document), "Accept length against the break-even it needs")
    section.add(beside(chart, need), _table(document, dict(profiled)))
    if "one_start" in document:
        words = (
            f"One start, draft steps switched between requests. {_reference(document)}: no drafts, but the draft's "
            "forward over the accepted tokens still runs, so it is not plain decoding; ratios and break-even above "
            "are against it."
        )
        section.add(paragraph(words, "note"))
        if document["confirmation"] is not None:
            section.add(paragraph(f"In starts of their own, {document['confirmation']['starts']} a side:"))
            section.add(_table(document["confirmation"], {}))
    for row in document["arms"]:
        if row["failed"]:
            section.add(paragraph(f"{row['setting']}: {row['failed']} requests failed.", "note"))
        if row["reason"]:
            section.add(paragraph(f"{row['setting']}: {row['reason']}"))
        if stalled_line(row.get("stalled")) and not mostly_stalled(row.get("stalled")):
            section.add(paragraph(f"{row['setting']}: {stalled_line(row.get('stalled'))}"))
        drift = row["drift"]
        if drift and drift["p_value"] < 0.01:
            said = (
                f"{row['setting']}: speed drifted by {drift['percent']:+.1f} % over the run (p {drift['p_value']:.1g})."
            )
            section.add(paragraph(said, "note"))
    limit = 100 * document["threshold"]
    return [section.add(paragraph(f"A verdict needs the whole interval of the ratio beyond {limit:g} %."))]


def _table(document: Document, profiled: Mapping[int, float]) -> str:
    rows = []
    for row in document["arms"]:
        guess = speed_charts.predicted_rate(row)
        own = row["settings"]
        chain = profiled.get(own.get("steps", -1)) if own.get("topk", 1) == 1 else None
        mark = " (fastest)" if row["setting"] == document["best"] else ""
        rows.append(
            (
                row["setting"] + mark, point(row["tokens_per_s"], 1), number(guess, 1), number(chain, 1),
                point(row["ratio"]), span(row["ratio"]), point(row["accept_length_tokens"], 2),
                number(row["break_even_tokens"], 2), point(row["cycle_ms"]), row["verdict"],
            )
        )  # fmt: skip
    columns = (
        "setting", "tok/s", "by cycles", "by profile", "x baseline", "95 % interval", "accept", "break-even",
        "cycle ms", "verdict",
    )  # fmt: skip
    return table(columns, rows, "Every setting", (0, 9))
