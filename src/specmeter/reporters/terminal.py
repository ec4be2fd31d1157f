"""The report as text: the verdict first, then where the cycle goes, acceptance, and how sure all of it is."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.errors import SpecmeterError
from specmeter.reporters.inert import inert
from specmeter.reporters.sweep_table import sweep_parts

COLOURS = {
    "draft": "cyan", "verify": "magenta", "accept": "yellow", "extend": "blue", "kv": "green",
    "schedule": "bright_blue", "wait": "bright_black", "other": "white", "glue": "bright_black", "unattributed": "red",
}  # fmt: skip
# One letter a phase, so that the bar reads without colour too.
LETTERS = {
    "draft": "D", "verify": "V", "accept": "A", "extend": "E", "kv": "K", "schedule": "S", "wait": "w", "other": "o",
    "glue": "g", "unattributed": "?",
}  # fmt: skip


def print_analysis(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print an analysis document; colour only on a terminal, and not under NO_COLOR."""
    out = file or sys.stdout
    width = shutil.get_terminal_size((100, 24)).columns if out.isatty() else 100
    _print(document, Console(file=out, width=max(width, 40), highlight=False, markup=False, emoji=False))


def render_analysis(document: Mapping[str, Any], width: int = 100) -> str:
    """An analysis document as plain text, ``width`` columns wide."""
    out = io.StringIO()
    _print(
        document,
        Console(
            file=out, width=width, highlight=False, markup=False, emoji=False, color_system=None, force_terminal=False
        ),
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _print(document: Mapping[str, Any], console: Console) -> None:
    parts: dict[str, Callable[[Mapping[str, Any], int], Iterator[RenderableType]]] = {
        "profile": _profile_parts,
        "sweep": sweep_parts,
    }
    kind = document.get("kind")
    if kind not in parts:
        raise SpecmeterError(f"There is no report for an analysis of kind {inert(kind)}")
    for part in parts[kind](document, console.width):
        console.print(part)


def _profile_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    yield Text(inert(document["verdict"]["sentence"], 400), style="bold")
    yield ""
    engine, cycle = document["engine"], document["cycle"]
    mean = cycle["mean_ms"]
    yield Text(
        f"{inert(engine['name'])} {inert(engine['version'] or '')}: cycle {mean['point']:.3f} ms"
        f"{plus_minus(mean)}, p50 {cycle['p50_ms']:.3f}, p95 {cycle['p95_ms']:.3f}, {cycle['count']} decode cycles, "
        f"{document['clock']} clock"
    )
    yield _bar(document, width)
    yield _phase_table(document)
    if document["draft_steps"]:
        yield _step_table(document)
    yield from _coverage(document)
    yield ""
    yield from _acceptance(document)
    yield from _gain(document)
    yield from _sureness(document)


def _bar(document: Mapping[str, Any], width: int) -> Text:
    shares = [(row["name"], row["percent"]) for row in document["phases"]]
    shares.append(("glue", document["coverage"]["glue_percent"]))
    shares.append(("unattributed", max(0.0, document["coverage"]["unattributed_percent"])))
    text = Text("|")
    done, cells = 0.0, width - 2
    for name, percent in shares:
        begin, done = round(done * cells / 100), min(100.0, done + percent)
        text.append(LETTERS[name] * (round(done * cells / 100) - begin), style=COLOURS[name])
    text.append("|\n")
    shown = [(name, percent) for name, percent in shares if percent >= 0.05]
    text.append(" ".join(f"{LETTERS[name]}={name} {percent:.1f} %" for name, percent in shown))
    return text


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold", header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return table


def _phase_table(document: Mapping[str, Any]) -> Table:
    table = _table("\nWhere the cycle goes", "phase", "ms", "share", "calls", "p50 ms", "p95 ms")
    for phase in document["phases"]:
        table.add_row(*_cells(phase), style=COLOURS[phase["name"]])
        points = [p for p in document["points"] if p["phase"] == phase["name"]]
        for point in points:
            if len(points) > 1 or point["name"] != phase["name"]:
                table.add_row(*_cells(point, "  "))
    coverage, mean = document["coverage"], document["cycle"]["mean_ms"]["point"]
    for name, percent in (
        ("glue (frames between points)", coverage["glue_percent"]),
        ("unattributed", coverage["unattributed_percent"]),
    ):
        table.add_row(name, f"{percent * mean / 100:.3f}", f"{percent:.1f} %", "", "", "")
    for row in document["beside"]:
        table.add_row(f"beside the cycle: {inert(row['name'], 40)}", f"{row['ms']:.3f}", "", "", "", "")
    return table


def _cells(row: Mapping[str, Any], indent: str = "") -> list[str]:
    return [
        indent + inert(row["name"], 40), f"{row['ms']:.3f}", f"{row['percent']:.1f} %", f"{row['calls']:.1f}",
        f"{row['p50_ms']:.3f}", f"{row['p95_ms']:.3f}",
    ]  # fmt: skip


def _step_table(document: Mapping[str, Any]) -> Table:
    table = _table("\nDraft steps", "step", "ms", "cycles", "parts")
    extend = [p for p in document["points"] if p["phase"] == "extend"]
    if extend:
        parts = ", ".join(f"{inert(p['name'], 40)} {p['ms']:.3f}" for p in extend)
        table.add_row("1 (from extend)", f"{sum(p['ms'] for p in extend):.3f}", str(document["cycle"]["count"]), parts)
    for step in document["draft_steps"]:
        parts = ", ".join(f"{inert(name, 40)} {ms:.3f}" for name, ms in step["parts_ms"].items())
        table.add_row(str(step["step"]), f"{step['ms']:.3f}", str(step["cycles"]), parts)
    table.columns[-1].no_wrap = False
    table.columns[-1].justify = "left"
    return table


def _coverage(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    c = document["coverage"]
    yield (
        f"\nCoverage: named leaf points {c['leaf_percent']:.2f} % (waiting {c['of_which_wait_percent']:.2f} % in it), "
        f"glue {c['glue_percent']:.2f} %, unattributed {c['unattributed_percent']:.2f} %"
    )


def _acceptance(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    found = document["acceptance"]
    length = found["length_tokens"]
    if length is None:
        yield f"Accept length: not measured ({inert(found['reason'], 120)})"
        return
    yield f"Accept length: {length['point']:.3f} tokens a cycle{plus_minus(length)}, bonus included"
    if found["positions"]:
        table = _table("", "draft position", *(str(p["position"]) for p in found["positions"]))
        table.title = None
        table.add_row("kept, of all drafted", *(_percent(p["cumulative"]) for p in found["positions"]))
        table.add_row("kept, if the one before was", *(_percent(p["conditional"]) for p in found["positions"]))
        yield table


def _gain(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    base, even = document["baseline"], document["break_even_tokens"]
    if base["step_ms"] is None:
        yield f"Baseline step: not measured ({inert(base['reason'], 120)})"
        yield f"Break-even accept length: not known ({inert(document['reason'], 120)})"
        return
    yield f"Baseline step: {base['step_ms']['point']:.3f} ms{plus_minus(base['step_ms'])} ({inert(base['source'])})"
    if even is not None:
        yield f"Break-even accept length: {even['point']:.3f} tokens{plus_minus(even)} (cycle / baseline step)"
    if document["expected_speedup"] is not None:
        gain = document["expected_speedup"]
        yield f"Expected speed-up: {gain['point']:.3f} x{plus_minus(gain)} (accept length / break-even)"
    if document["measured_speedup"] is not None:
        gain = document["measured_speedup"]
        how = f"{gain['method']}, {gain['n']} {gain['unit']}s"
        yield f"Measured speed-up: {gain['point']:.3f} x{plus_minus(gain)} ({how})"


def _sureness(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield ""
    verdict, mean, cycle = document["verdict"], document["cycle"]["mean_ms"], document["cycle"]
    yield (
        f"How sure: {verdict['word']}, by {inert(verdict['basis'], 120)}; intervals are 95 %, "
        f"the cycle's over {mean['n']} units, each a {mean['unit']}"
    )
    drift = cycle["drift"]
    if drift and drift["p_value"] < 0.01:
        yield f"Drift: cycles changed by {drift['percent']:+.1f} % over the run (p {drift['p_value']:.1g})"
    overhead = document["overhead"]
    if overhead is not None:
        p = overhead["percent"]
        yield (
            f"Probe overhead: {p['point']:.2f} % of a cycle{plus_minus(p)}, {overhead['cycles_in']} cycles with probes "
            f"against {overhead['cycles_out']} of the original code"
        )
    left_out = ", ".join(f"{count} {why}" for why, count in cycle["dropped"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in cycle["kinds"].items() if count and kind != "decode")
    yield f"Left out: {left_out or 'nothing'}" + (f"; other kinds: {kinds}" if kinds else "")
    lost = document["records"]
    if lost["overwritten"] or lost["holes"]:
        yield f"Records: {lost['count']} read, {lost['overwritten']} overwritten, {lost['holes']} incomplete"
    for refused in document["refused"]:
        yield f"Not placed: {inert(refused.get('name', '?'))} ({inert(refused.get('reason', ''), 160)})"
    if document["ranks"]:
        yield _rank_table(document)


def _rank_table(document: Mapping[str, Any]) -> Table:
    phases = [row["name"] for row in document["phases"]]
    table = _table("\nRanks (mean ms a cycle)", "rank", "cycle", *phases)
    for rank in document["ranks"]:
        values = [f"{rank['phases_ms'].get(phase, 0.0):.3f}" for phase in phases]
        table.add_row(f"{rank['rank']} on {inert(rank['host'], 20)}", f"{rank['cycle_ms']:.3f}", *values)
    return table


def plus_minus(interval: Mapping[str, Any]) -> str:
    """`` [low, high]``, or a note that there is no interval."""
    if interval["low"] is None or interval["high"] is None:
        return " (no interval: too few units)"
    return f" [{interval['low']:.3f}, {interval['high']:.3f}]"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
