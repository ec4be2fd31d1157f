"""The sections of a profiled run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specmeter.analysis.stalls import RULE
from specmeter.reporters.html import acceptance_charts, cycle_charts, timeline
from specmeter.reporters.html.deep_section import deep_sections
from specmeter.reporters.html.device_section import device_sections
from specmeter.reporters.html.facts import Cycles, Floats, cycles_by_rank, phase_times
from specmeter.reporters.html.markup import Section, beside, cards, details, figure, paragraph, table, text
from specmeter.reporters.html.ranks_section import collective_sections, rank_parts
from specmeter.reporters.levers import levers
from specmeter.reporters.numbers import (
    accept_range,
    bounds,
    cut,
    device_line,
    mostly_stalled,
    no_interval,
    number,
    percent,
    plus_minus,
    point,
    span,
    stalled_line,
    units,
)
from specmeter.reporters.sampling_words import sampling_lines
from specmeter.trace.rundir import Run

Document = Mapping[str, Any]


def profile_sections(run: Run, prefix: str = "") -> list[Section]:
    """All sections of a run whose analysis is of kind ``profile``; ``prefix`` makes anchors unique."""
    document = run.analysis
    ranks = cycles_by_rank(run, document["setting"])
    lead = ranks[0] if ranks else None
    phases = phase_times(run, lead) if lead is not None and lead.chosen.any() else {}
    return [
        _cycle(run, document, prefix),
        *device_sections(document, prefix),
        *deep_sections(document, prefix),
        *collective_sections(document, prefix),
        _timeline(run, ranks, prefix),
        _spread(lead, phases, prefix),
        _acceptance(run, document, lead, prefix),
        _help(document, prefix),
        _sure(document, ranks, prefix),
    ]


def key_figures(document: Document) -> str:
    """The numbers that the verdict rests on."""
    cycle, base, length = (
        document["cycle"]["mean_ms"],
        document["baseline"]["step_ms"],
        document["acceptance"]["length_tokens"],
    )
    even, gain, measured = document["break_even_tokens"], document["expected_speedup"], document["measured_speedup"]
    missing = document["baseline"]["reason"] or document["reason"]
    possible = accept_range(len(document["acceptance"]["positions"]))
    facts = [("Cycle", f"{point(cycle)} ms", _interval(cycle, "ms"))]
    facts.append(("Baseline step", f"{point(base)} ms" if base else "-", _interval(base, "ms") if base else missing))
    facts.append(
        (
            "Accept length", f"{point(length)} tokens" if length else "-",
            _interval(length, "tokens", *possible) if length else document["acceptance"]["reason"],
        )
    )  # fmt: skip
    facts.append(
        (
            "Break-even",
            f"{point(even)} tokens" if even else "-",
            _interval(even, "tokens") if even else document["reason"],
        )
    )
    if gain or measured:
        facts.append(("Expected speed-up", f"{point(gain)} x" if gain else "-", _interval(gain, "x") if gain else ""))
    if measured:
        facts.append(("Measured speed-up", f"{point(measured)} x", _interval(measured, "x")))
    stalls = mostly_stalled(document["cycle"].get("stalled"))
    return (paragraph(stalls, "note") if stalls else "") + cards(facts)


def _interval(interval: Mapping[str, Any], unit: str, floor: float = 0.0, most: float = math.inf) -> str:
    if bounds(interval, floor, most) is None:
        return no_interval(interval)
    ends = f"{span(interval, 3, floor, most, mark=False)} {unit}{cut(interval, floor, most)}"
    return f"{ends} (95 %, {units(interval['n'], interval['unit'])})"


def _cycle(run: Run, document: Document, prefix: str) -> Section:
    note = (
        "Phases of the mean cycle, end to end. Speculation wins when the cycle ends left of the break-even line: "
        "what plain decoding takes for the tokens of one cycle: accept length x baseline step."
    )
    section = Section("Where the cycle goes", f"{prefix}cycle")
    chart = figure(cycle_charts.cycle_chart(document), "The cycle against the baseline", note)
    section.add(beside(chart, _phase_table(document)))
    if device_line(document.get("device")):
        section.add(paragraph(f"{device_line(document['device'])}."))
    verify = [row for row in document["points"] if row["phase"] == "verify"]
    plain = timeline.baseline_parts(run)
    if not plain and "baseline" in run.children:
        plain = timeline.baseline_parts(run.children["baseline"])
    step = document["baseline"]["step_ms"]
    if verify:
        made = cycle_charts.parts_chart(verify, plain, step["point"] if step else None)
        note = "Host time of the points of verify, beside the points of one step of plain decoding."
        rows = [("verify", row["name"], number(row["ms"])) for row in verify]
        rows += [("baseline step", name, number(ms)) for name, ms in plain]
        parts = table(["in", "point", "ms"], rows, "Verify and a decode step by point", (0, 1))
        section.add(beside(figure(made, "What verify is made of, beside a decode step", note), parts))
    if document["draft_steps"]:
        section.add(_steps(document))
    return section


def _phase_table(document: Document) -> str:
    rows: list[Sequence[object]] = []
    for phase in document["phases"]:
        rows.append(_phase_row(phase, ""))
        points = [p for p in document["points"] if p["phase"] == phase["name"]]
        rows += [_phase_row(p, "· ") for p in points if len(points) > 1 or p["name"] != phase["name"]]
    coverage, mean = document["coverage"], document["cycle"]["mean_ms"]["point"]
    for name, key in (("glue (frames between points)", "glue_percent"), ("unattributed", "unattributed_percent")):
        rows.append((name, number(coverage[key] * mean / 100), f"{coverage[key]:.1f} %", "", "", ""))
    rows += [(f"beside the cycle: {row['name']}", number(row["ms"]), "", "", "", "") for row in document["beside"]]
    columns = ("phase", "ms", "share", "calls", "p50 ms", "p95 ms")
    return table(columns, rows, f"Mean of {document['cycle']['count']} decode cycles, {document['clock']} clock")


def _phase_row(row: Mapping[str, Any], indent: str) -> Sequence[object]:
    return (
        indent + str(row["name"]), number(row["ms"]), f"{row['percent']:.1f} %", f"{row['calls']:.1f}",
        number(row["p50_ms"]), number(row["p95_ms"]),
    )  # fmt: skip


def _steps(document: Document) -> str:
    rows = [
        (
            step["step"],
            number(step["ms"]),
            step["cycles"],
            ", ".join(f"{n} {ms:.3f}" for n, ms in step["parts_ms"].items()),
        )
        for step in document["draft_steps"]
    ]
    columns = ("draft step", "ms", "cycles", "parts, ms")
    return details("Draft steps", table(columns, rows, "From step 2; step 1 is made by extend", (0, 3)))


def _timeline(run: Run, ranks: Sequence[Cycles], prefix: str) -> Section:
    section = Section("Sampled cycles", f"{prefix}timeline")
    charts = timeline.timeline_charts(run, ranks)
    if not charts:
        return section.add(paragraph("This run holds no spans, so no cycle can be drawn."))
    name = f"{prefix}panes"
    choices = "".join(
        f'<label><input type="radio" name="{name}"{" checked" if i == 0 else ""}> {text(title)}</label>'
        for i, (title, _) in enumerate(charts)
    )
    section.add(f'<fieldset data-panes="{name}" hidden><legend>Cycle</legend>{choices}</fieldset>')
    note = "A lane a rank and clock; named points only, gaps are frames between them."
    if len({r.rank.host for r in ranks}) > 1:
        note += (
            " Ranks on other hosts have clocks of their own: their cycle of the same number starts at the same zero."
        )
    if len(ranks) > timeline.MOST_RANKS:
        note += f" The first {timeline.MOST_RANKS} of {len(ranks)} ranks."
    if any("device</text>" in svg for _, svg in charts):
        note += " Device spans are those of the device's own clock, fitted to the host's calls (docs/export.md)."
    else:
        note += " No device lane: this run recorded host time only."
    for title, svg in charts:
        section.add(f'<div data-pane-of="{name}">{figure(svg, title, note)}</div>')
    return section


def _spread(lead: Cycles | None, phases: Mapping[str, Floats], prefix: str) -> Section:
    section = Section("How the phases spread", f"{prefix}spread")
    if lead is None or not phases:
        return section.add(paragraph("This run holds no tables of cycles and spans."))
    values = {"cycle": lead.ms, **phases}
    note = f"{len(lead.ms)} cycles of {lead.rank.name}; half a percent at either end lies outside of the bins."
    out = int(lead.counted.sum() - lead.chosen.sum())
    note += f" {out} stalls ({RULE}) are left out." if out else ""
    section.add(beside(figure(cycle_charts.spread_charts(values), "Milliseconds a cycle", note), _spread_table(values)))
    return section


def _spread_table(values: Mapping[str, Floats]) -> str:
    import numpy as np

    rows = [
        (name, number(float(v.mean())), *(number(x) for x in np.percentile(v, [5, 50, 95, 100]).tolist()))
        for name, v in values.items()
    ]
    return table(("phase", "mean ms", "p5", "p50", "p95", "most"), rows, "Over the chosen cycles, ms")


def _acceptance(run: Run, document: Document, lead: Cycles | None, prefix: str) -> Section:
    section = Section("Acceptance", f"{prefix}acceptance")
    found = document["acceptance"]
    length = found["length_tokens"]
    if length is None:
        return section.add(paragraph(f"Accept length: not measured ({found['reason']})"))
    ends = plus_minus(length, 3, *accept_range(len(found["positions"])))
    section.add(paragraph(f"{point(length)} tokens a cycle{ends}, the bonus token included."))
    if found["positions"]:
        rows = [
            (p["position"], percent(p["cumulative"]), percent(p["conditional"]), p["reached"])
            for p in found["positions"]
        ]
        columns = ("draft position", "kept, of all drafted", "kept, if the one before was", "reached")
        chart = figure(acceptance_charts.positions_chart(found["positions"]), "By draft position")
        section.add(beside(chart, table(columns, rows, "By draft position (in a tree: by depth)")))
    if lead is None:
        return section
    even = document["break_even_tokens"]["point"] if document["break_even_tokens"] else None
    for title, groups in (
        ("prompt kind", acceptance_charts.groups_by_kind(lead)),
        ("prompt length, tokens", acceptance_charts.groups_by_length(run, lead)),
    ):
        if groups:
            chart = figure(acceptance_charts.groups_chart(groups, title, even), f"By {title}", "Dashed: break-even.")
            listed = [
                (
                    g.name,
                    number(g.length.point),
                    span(g.length.as_json(), 2, *accept_range(g.steps)),
                    g.cycles,
                    g.requests,
                )
                for g in groups
            ]
            names = (title, "accept length", "95 % interval", "cycles", "requests")
            section.add(beside(chart, table(names, listed, f"By {title}")))
    return section


def _help(document: Document, prefix: str) -> Section:
    section = Section("What would help", f"{prefix}help")
    rows = [(lever.what, lever.amount, lever.why) for lever in levers(document)]
    if not rows:
        return section.add(paragraph("No single part of the cycle would give half a percent."))
    section.add(table(("change", "gain", "why"), rows, "Speed against now", (0, 2)))
    return section.add(
        paragraph("At most: the part took no time at all. About: computed from the parts measured here.")
    )


def _sure(document: Document, ranks: Sequence[Cycles], prefix: str) -> Section:
    section = Section("How sure", f"{prefix}sure")
    verdict, cycle = document["verdict"], document["cycle"]
    section.add(paragraph(f"Verdict: {verdict['word']}, by {verdict['basis']}. Intervals are 95 %."))
    drift = cycle["drift"]
    if drift and drift["p_value"] < 0.01:
        section.add(
            paragraph(f"Cycles changed by {drift['percent']:+.1f} % over the run (p {drift['p_value']:.1g}).", "note")
        )
    sampling = sampling_lines(document.get("sampling"))
    section.add(*(paragraph(f"{line}.") for line in sampling))
    over = document["overhead"]
    if over is not None and not sampling:
        share = over["percent"]
        section.add(
            paragraph(
                f"Probe overhead: {share['point']:.2f} % of a cycle{plus_minus(share, floor=float('-inf'))}, "
                f"{over['cycles_in']} cycles with probes against {over['cycles_out']} of the original code."
            )
        )
    dropped = ", ".join(f"{count} {why}" for why, count in cycle["dropped"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in cycle["kinds"].items() if count)
    lost, stalled = document["records"], stalled_line(cycle.get("stalled"))
    section.add(
        paragraph(
            f"Cycles by kind, those of the baseline included: {kinds or 'none'}. Times are over the {cycle['count']} "
            f"decode cycles of the profiled setting. Left out: {dropped or 'nothing'}."
        ),
        *([paragraph(stalled)] if stalled and not mostly_stalled(cycle.get("stalled")) else []),
        paragraph(f"Records: {lost['count']} read, {lost['overwritten']} overwritten, {lost['holes']} incomplete."),
    )
    if document["refused"]:
        rows = [(r.get("name", "?"), r.get("reason", "")) for r in document["refused"]]
        section.add(table(("not placed", "why"), rows, "Points that were not measured", (0, 1)))
    return section.add(*rank_parts(document, ranks))
