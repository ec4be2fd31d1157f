"""A profile as text: verdict, cycle bar, phase table, acceptance, what would help, how sure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from specmeter.reporters.collectives_view import collectives_parts
from specmeter.reporters.deep_view import deep_parts
from specmeter.reporters.device_view import device_parts
from specmeter.reporters.inert import inert
from specmeter.reporters.language import (
    COLOURS,
    LABEL,
    MIDDLE,
    NARROW,
    bar,
    heading,
    legend,
    make_table,
    remark,
    strip,
    verdict_line,
)
from specmeter.reporters.levers import levers
from specmeter.reporters.numbers import (
    accept_range,
    device_line,
    mostly_stalled,
    percent,
    plus_minus,
    stalled_line,
    units,
)
from specmeter.reporters.ranks_view import ranks_parts
from specmeter.reporters.sampling_words import sampling_lines

# What a reason for leaving cycles out means, where its words do not tell.
_WHY = {"outside of every request": " (none of those sent here: the server was idle, or another client's)"}


def profile_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of a profile's report, in order; ``width`` in columns."""
    yield verdict_line(document["verdict"]["sentence"], document["verdict"]["word"])
    if mostly_stalled(document["cycle"].get("stalled")):
        yield remark(mostly_stalled(document["cycle"].get("stalled")))
    if setting_line(document):
        yield remark(setting_line(document))
    yield ""
    yield from _bars(document, width)
    yield heading("Where the cycle goes")
    yield _phase_table(document, width)
    yield from _coverage(document)
    if device_line(document.get("device")):
        yield remark(device_line(document["device"]))
    yield from deep_parts(document, width)
    yield from device_parts(document, width)
    if document["draft_steps"]:
        yield heading("Draft steps")
        yield _step_table(document, width)
    yield heading("Acceptance")
    yield from _acceptance(document, width)
    if document.get("wiring"):
        yield verdict_line(document["wiring"]["sentence"], document["wiring"]["word"])
    yield heading("Gain")
    yield from _gain(document)
    yield from _help(document, width)
    yield heading("How sure")
    yield from _sureness(document)
    yield from ranks_parts(document, width)
    yield from collectives_parts(document, width)


def setting_line(document: Mapping[str, Any]) -> str:
    """What was measured: ``Setting: k=2``, for a server's own by the steps of its cycles; empty where none tells it."""
    name, steps = document.get("setting"), document.get("steps")
    if name in (None, "", "server"):
        name = f"k={steps}, the server's own" if steps else ""
    return f"Setting: {inert(name, 60)}" if name else ""


def cycle_shares(document: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The phases, glue and unattributed time as (name, share of the cycle)."""
    shares = [(str(row["name"]), row["percent"] / 100) for row in document["phases"]]
    shares.append(("glue", document["coverage"]["glue_percent"] / 100))
    shares.append(("unattributed", max(0.0, document["coverage"]["unattributed_percent"] / 100)))
    return shares


def _bars(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The cycle, a baseline step, and what plain decoding takes for the tokens of one cycle, on one scale."""
    cycle = document["cycle"]["mean_ms"]["point"]
    base, length = document["baseline"]["step_ms"], document["acceptance"]["length_tokens"]
    step = base["point"] if base else None
    same = step * length["point"] if step is not None and length else None
    most = max(cycle, step or 0.0, same or 0.0)
    cells = width - LABEL - 2 - 13
    shares = cycle_shares(document)
    yield bar("cycle", [(name, share * cycle / most) for name, share in shares], cells, f" {cycle:.3f} ms")
    if step is not None:
        yield bar("plain step", [("=", step / most)], cells, f" {step:.3f} ms")
    if same is not None:
        yield bar("pays below", [("-", same / most)], cells, f" {same:.3f} ms")
    yield legend(shares)
    if same is not None and length:
        yield remark(
            f"pays below: what plain decoding takes for the {length['point']:.2f} tokens of a cycle "
            "(accept length x baseline step); a shorter cycle wins"
        )


def _columns(width: int) -> list[str]:
    """The columns of a phase table that fit: the share always, percentiles only with room."""
    names = ["ms", "share"]
    names += ["calls"] if width >= NARROW else []
    return names + (["p50 ms", "p95 ms"] if width >= NARROW else [])


def _phase_table(document: Mapping[str, Any], width: int) -> Table:
    columns = _columns(width)
    table = make_table(["phase", *columns])
    for phase in document["phases"]:
        _add_row(table, phase, columns, "", COLOURS[phase["name"]])
        points = [p for p in document["points"] if p["phase"] == phase["name"]]
        for row in points:
            if len(points) > 1 or row["name"] != phase["name"]:
                _add_row(table, row, columns, "  ", "")
    coverage, mean = document["coverage"], document["cycle"]["mean_ms"]["point"]
    rest = [""] * (len(columns) - 2)
    for name, key in (("glue (frames between points)", "glue_percent"), ("unattributed", "unattributed_percent")):
        share = coverage[key]
        table.add_row(name, f"{share * mean / 100:.3f}", f"{share:.1f} %", *rest)
    for row in document["beside"]:
        table.add_row(f"beside the cycle: {inert(row['name'], 40)}", f"{row['ms']:.3f}", "", *rest)
    return table


def _add_row(table: Table, row: Mapping[str, Any], columns: list[str], indent: str, style: str) -> None:
    cells = {
        "ms": f"{row['ms']:.3f}", "share": f"{row['percent']:.1f} %", "calls": f"{row['calls']:.1f}",
        "p50 ms": f"{row['p50_ms']:.3f}", "p95 ms": f"{row['p95_ms']:.3f}",
    }  # fmt: skip
    table.add_row(indent + inert(row["name"], 40), *(cells[name] for name in columns), style=style)


def _coverage(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    c, engine, cycle = document["coverage"], document["engine"], document["cycle"]
    yield remark(
        f"Coverage: named leaf points {c['leaf_percent']:.2f} % (waiting {c['of_which_wait_percent']:.2f} % in it), "
        f"glue {c['glue_percent']:.2f} %, unattributed {c['unattributed_percent']:.2f} %"
    )
    yield remark(
        f"{inert(engine['name'])} {inert(engine['version'] or '')}: cycle {cycle['mean_ms']['point']:.3f} ms"
        f"{plus_minus(cycle['mean_ms'])}, p50 {cycle['p50_ms']:.3f}, p95 {cycle['p95_ms']:.3f}, "
        f"{cycle['count']} decode cycles, {document['clock']} clock"
    )


def _step_table(document: Mapping[str, Any], width: int) -> Table:
    wide = width >= MIDDLE
    table = make_table(["step", "ms", "cycles", *(["parts, ms"] if wide else [])], left=(0, 3))
    extend = [p for p in document["points"] if p["phase"] == "extend"]
    rows = [
        (str(step["step"]), step["ms"], step["cycles"], list(step["parts_ms"].items()))
        for step in document["draft_steps"]
    ]
    if extend:
        parts = [(p["name"], p["ms"]) for p in extend]
        rows.insert(0, ("1 (from extend)", sum(ms for _, ms in parts), document["cycle"]["count"], parts))
    for name, ms, cycles, listed in rows:
        text = ", ".join(f"{inert(part, 40)} {value:.3f}" for part, value in listed)
        table.add_row(name, f"{ms:.3f}", str(cycles), *([text] if wide else []))
    return table


def _acceptance(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    found = document["acceptance"]
    length = found["length_tokens"]
    if length is None:
        yield remark(f"Accept length: not measured ({inert(found['reason'], 120)})")
        return
    ends = plus_minus(length, 3, *accept_range(len(found["positions"])))
    yield remark(f"Accept length: {length['point']:.3f} tokens a cycle{ends}, bonus included")
    if found["positions"]:
        yield position_table(found["positions"], width)


def position_table(positions: list[Mapping[str, Any]], width: int) -> Table:
    """Acceptance by draft position, a row a position, with a bar where there is room."""
    wide = width >= MIDDLE
    names = ["draft position", "kept, of all drafted", "kept, if the one before was"]
    if width < NARROW:
        names[1:] = ["kept of all", "if before"]
    table = make_table([*names, *([""] if wide else [])], left=(3,))
    for row in positions:
        cells = [str(row["position"]), percent(row["cumulative"]), percent(row["conditional"])]
        table.add_row(*cells, *([strip(row["cumulative"])] if wide else []))
    return table


def _gain(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    base, even = document["baseline"], document["break_even_tokens"]
    if base["step_ms"] is None:
        yield remark(f"Baseline step: not measured ({inert(base['reason'], 120)})")
        yield remark(f"Break-even accept length: not known ({inert(document['reason'], 120)})")
        return
    step = base["step_ms"]
    yield remark(f"Baseline step: {step['point']:.3f} ms{plus_minus(step)} ({inert(base['source'])})")
    if even is not None:
        yield remark(f"Break-even accept length: {even['point']:.3f} tokens{plus_minus(even)} (cycle / baseline step)")
    gain = document["expected_speedup"]
    if gain is not None:
        yield remark(f"Expected speed-up: {gain['point']:.3f} x{plus_minus(gain)} (accept length / break-even)")
    gain = document["measured_speedup"]
    if gain is not None:
        how = f"{gain['method']}, {units(gain['n'], gain['unit'])}"
        yield remark(f"Measured speed-up: {gain['point']:.3f} x{plus_minus(gain)} ({how})")


def _help(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    found = levers(document)[:5]
    yield heading("What would help (speed against now)")
    if not found:
        yield remark("No single part of the cycle would give half a percent.")
        return
    if width < MIDDLE:
        for lever in found:
            yield remark(f"{lever.amount}: {lever.what} ({lever.why})")
        return
    table = make_table(["change", "gain", "why"], left=(0, 2))
    for lever in found:
        table.add_row(lever.what, lever.amount, lever.why)
    yield table


def _sureness(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    verdict, mean, cycle = document["verdict"], document["cycle"]["mean_ms"], document["cycle"]
    yield remark(
        f"{inert(verdict['word'], 20)}, by {inert(verdict['basis'], 120)}; intervals are 95 %, "
        f"the cycle's over {units(mean['n'], mean['unit'])}"
    )
    drift = cycle["drift"]
    if drift and drift["p_value"] < 0.01:
        yield remark(f"Drift: cycles changed by {drift['percent']:+.1f} % over the run (p {drift['p_value']:.1g})")
    sampling = sampling_lines(document.get("sampling"))
    yield from (remark(line) for line in sampling)
    yield from () if sampling else _overhead(document["overhead"])
    left_out = ", ".join(f"{count} {inert(why)}{_WHY.get(why, '')}" for why, count in cycle["dropped"].items())
    kinds = ", ".join(f"{count} {inert(kind)}" for kind, count in cycle["kinds"].items() if count and kind != "decode")
    yield remark(f"Left out: {left_out or 'nothing'}" + (f"; other kinds: {kinds}" if kinds else ""))
    if stalled_line(cycle.get("stalled")) and not mostly_stalled(cycle.get("stalled")):
        yield remark(stalled_line(cycle.get("stalled")))
    lost = document["records"]
    if lost["overwritten"] or lost["holes"]:
        yield remark(f"Records: {lost['count']} read, {lost['overwritten']} overwritten, {lost['holes']} incomplete")
    for refused in document["refused"]:
        yield remark(f"Not placed: {inert(refused.get('name', '?'))} ({inert(refused.get('reason', ''), 160)})")


def _overhead(found: Mapping[str, Any] | None) -> Iterator[RenderableType]:
    if found is None:
        return
    share = found["percent"]
    # A difference of two means, so below zero is possible: no effect beyond noise.
    yield remark(
        f"Probe overhead: {share['point']:.2f} % of a cycle{plus_minus(share, floor=float('-inf'))}, "
        f"{found['cycles_in']} cycles with probes against {found['cycles_out']} of the original code"
    )
