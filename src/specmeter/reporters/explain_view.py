"""The text of ``specmeter explain``: one sentence, the curve, what-ifs, three actions, and what all of it assumes."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert


def print_explain(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print an explain document; colour only on a terminal, and not under NO_COLOR."""
    out = file or sys.stdout
    width = shutil.get_terminal_size((100, 24)).columns if out.isatty() else 100
    console = Console(file=out, width=max(width, 60), highlight=False, markup=False, emoji=False)
    for part in explain_parts(document):
        console.print(part)


def render_explain(document: Mapping[str, Any], width: int = 100) -> str:
    """An explain document as plain text, ``width`` columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False, color_system=None)
    for part in explain_parts(document):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def explain_parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The parts of the text, in order."""
    yield Text(inert(document["sentence"], 400), style="bold")
    yield ""
    yield _curve(document)
    yield from _curve_notes(document)
    yield from _verify(document)
    for answer in document["what_if"]:
        yield from _answer(answer)
    yield from _actions(document)
    yield from _sureness(document)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _curve(document: Mapping[str, Any]) -> Table:
    table = _table("steps", "cycle ms", "", "accept", "", "tok/s", "", "break-even", "one more step", "")
    for row in document["curve"]:
        now, best = row["steps"] == document["now_steps"], row["steps"] == document["best_steps"]
        mark = {(True, True): "now, best", (True, False): "now", (False, True): "best"}.get((now, best), "")
        more = row["one_more_step"]
        step = "-" if more["ms"] is None else f"{more['tokens']:+.3f} for {more['ms']:+.2f} ms"
        table.add_row(
            f"{row['steps']}{_letter(row['status'])}",
            f"{row['cycle_ms']['point']:.2f}", _error(row["cycle_ms"]),
            f"{row['accept_length_tokens']['point']:.2f}", _error(row["accept_length_tokens"]),
            f"{row['tokens_per_s']['point']:.1f}", _error(row["gain"]),
            f"{row['break_even_tokens']['point']:.2f}" if row["break_even_tokens"] else "-",
            step, mark,
            style="bold" if best else "",
        )  # fmt: skip
    return table


def _letter(status: str) -> str:
    return {"measured": " m", "interpolated": " i", "extrapolated": " x"}.get(status, "")


def _error(interval: Mapping[str, Any]) -> str:
    """The wider half of an interval in percent, or a question mark where there is none."""
    if interval["low"] is None or interval["high"] is None:
        return "?"
    half = max(interval["high"] / interval["point"], interval["point"] / interval["low"]) - 1
    return f"±{100 * half:.0f} %"


def _curve_notes(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield "m measured, i between measured step counts, x extrapolated: not shown by any measurement."
    yield "± beside tok/s is the error of its ratio to the present steps, over the same prompts."
    base = document["baseline_step_ms"]
    if base is None:
        yield "No baseline step is known: no break-even. (profile measures it unless --baseline none)"
    else:
        yield f"Baseline step {base:.3f} ms, {1000 / base:.1f} tok/s; break-even is the accept length that equals it."
    kept = ", ".join(f"{100 * c:.1f} %" for c in document["acceptance_conditional"])
    yield f"Acceptance by position, if the one before was kept: {kept}"


def _verify(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = [row for row in document["verify"] if row["once_ms"] + row["width_ms"] > 0]
    if not rows:
        return
    yield ""
    experts = rows[0]["distinct_experts"] is not None
    table = _table("verify width", *(str(row["width"]) for row in rows))
    table.add_row("as one token, ms", *(f"{row['once_ms']:.2f}" for row in rows))
    table.add_row("for its width, ms", *(f"{row['width_ms']:.2f}" for row in rows))
    if experts:
        table.add_row("distinct experts", *(f"{row['distinct_experts']:.1f}" for row in rows))
    yield table


def _answer(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield ""
    yield Text(f"What if: {inert(answer['question'])}", style="bold")
    here, best = answer["here"], answer["best"]
    if here is None:
        yield f"  not known: {inert(answer['reason'], 400)}"
    else:
        yield f"  at {here['steps']} steps: {_gain(here['gain'])}, {here['tokens_per_s']['point']:.1f} tok/s" + _even(
            here
        )
        if best["steps"] != here["steps"]:
            yield (
                f"  at {best['steps']} steps, the best then: {_gain(best['gain'])}, "
                f"{best['tokens_per_s']['point']:.1f} tok/s"
            )
    for line in answer["assumptions"]:
        yield f"  assumes: {inert(line, 300)}"


def _even(row: Mapping[str, Any]) -> str:
    if row["break_even_tokens"] is None:
        return ""
    return f", break-even {row['break_even_tokens']['point']:.2f} for {row['accept_length_tokens']['point']:.2f} tokens"


def _gain(interval: Mapping[str, Any]) -> str:
    point = f"{100 * (interval['point'] - 1):+.1f} %"
    if interval["low"] is None or interval["high"] is None:
        return f"{point} (no interval)"
    return f"{point} [{100 * (interval['low'] - 1):+.1f}, {100 * (interval['high'] - 1):+.1f}]"


def _actions(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield ""
    found = document["actions"]
    if not found:
        yield Text("Nothing is predicted to help: the present setting is as good as this model can see.", style="bold")
        return
    yield Text(f"{len(found)} things to try, the most promising first", style="bold")
    for number, action in enumerate(found, 1):
        kind = {"ceiling": "half of all there is to win", "measured": "measured here", "setting": "predicted"}
        yield f"{number}. {inert(action['title'])}: {_gain(action['gain'])}, {kind[action['kind']]}"
        yield f"   {inert(action['why'], 400)}"
        yield Text(f"   $ {inert(action['command'], 2000)}", style="cyan", no_wrap=True, overflow="fold")


def _sureness(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield ""
    yield f"How sure: {document['interval']}; 95 %."
    for line in document["assumptions"]:
        yield f"  assumes: {inert(line, 300)}"
