"""The report of ``specmeter explain``: one sentence, the curve, what-ifs, three actions, and what all of it assumes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert
from specmeter.reporters.language import (
    LABEL,
    LETTERS,
    MIDDLE,
    NARROW,
    bar,
    heading,
    legend,
    make_table,
    remark,
    verdict_line,
)
from specmeter.reporters.numbers import MISSING, accept_range, bounds, no_interval, number, percent, point

_LETTERS = {"measured": "m", "interpolated": "i", "extrapolated": "x"}
_KINDS = {"ceiling": "half of all there is to win", "measured": "measured here", "setting": "predicted"}


def explain_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report, in order; ``width`` in columns."""
    yield verdict_line(document["sentence"])
    yield ""
    yield from _bars(document, width)
    yield heading("Draft steps")
    yield _curve(document, width)
    yield from _curve_notes(document, width)
    yield from _trees(document, width)
    yield from _verify(document, width)
    for answer in document["what_if"]:
        yield from _answer(answer)
    yield from _actions(document)
    yield heading("How sure")
    yield remark(f"Intervals are 95 %: {document['interval']}.")
    yield remark("Assumed:")
    for line in document["assumptions"]:
        yield _item(line)


def _item(text: object, indent: int = 2) -> Padding:
    """A line that is indented with all its continuations."""
    return Padding(Text(inert(text, 500)), (0, 0, 0, indent))


def _bars(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The present cycle, the best one where that is another, and a baseline step, on one scale."""
    rows = {row["steps"]: row for row in document["curve"] if row["phases_ms"]}
    steps = dict.fromkeys((document["now_steps"], document["best_steps"]))
    shown = []
    for k in (k for k in steps if k in rows):
        phases = rows[k]["phases_ms"]
        known = {name: phases[name] for name in LETTERS if name in phases}
        shown.append((k, {**known, **phases}, sum(phases.values())))
    base = document["baseline_step_ms"]
    most = max([total for _k, _phases, total in shown] + [base or 0.0])
    if not shown or most <= 0:
        return
    cells = width - LABEL - 2 - 13
    for k, phases, total in shown:
        shares = [(name, ms / most) for name, ms in phases.items()]
        yield bar(f"k={k}" + (" now" if k == document["now_steps"] else " best"), shares, cells, f" {total:.3f} ms")
    if base is not None:
        yield bar("plain step", [("=", base / most)], cells, f" {base:.3f} ms")
    _k, phases, total = shown[0]
    yield legend([(name, ms / total) for name, ms in phases.items()])


def _curve(document: Mapping[str, Any], width: int) -> Table:
    """Fewer columns where there is less room: numbers are never cut."""
    columns = ["steps", "cycle ms", "accept", "tok/s"]
    if width >= NARROW:
        columns = ["steps", "cycle ms", "", "accept", "", "tok/s", "", "break-even"]
    if width >= MIDDLE:
        columns += ["one more step"]
    table = make_table([*columns, ""], left=(0, len(columns)))
    for row in document["curve"]:
        now, best = row["steps"] == document["now_steps"], row["steps"] == document["best_steps"]
        mark = {(True, True): "now, best", (True, False): "now", (False, True): "best"}.get((now, best), "")
        table.add_row(*_cells(row, width), mark, style="bold" if best else "")
    return table


def _cells(row: Mapping[str, Any], width: int) -> list[str]:
    steps = f"{row['steps']} {_LETTERS.get(row['status'], '')}".rstrip()
    cycle, length, speed = row["cycle_ms"], row["accept_length_tokens"], row["tokens_per_s"]
    if width < NARROW:
        return [steps, point(cycle, 2), point(length, 2), point(speed, 1)]
    cells = [
        steps, point(cycle, 2), _error(cycle), point(length, 2), _error(length, *accept_range(row["steps"])),
        point(speed, 1), _error(row["gain"]), point(row["break_even_tokens"], 2),
    ]  # fmt: skip
    more = row["one_more_step"]
    if width >= MIDDLE:
        cells.append(MISSING if more["ms"] is None else f"{more['tokens']:+.3f} for {more['ms']:+.2f} ms")
    return cells


def _error(interval: Mapping[str, Any], floor: float = 0.0, most: float = math.inf) -> str:
    """The wider half of an interval in percent, or a question mark where there is none."""
    ends = bounds(interval, floor, most)
    if ends is None or ends[0] <= 0:
        return "?"
    half = 100 * (max(ends[1] / interval["point"], interval["point"] / ends[0]) - 1)
    return f"±{half:.0f} %" if half < 100 else ">100 %"


def _curve_notes(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    yield remark("m measured, i between measured step counts, x extrapolated: not shown by any measurement.")
    if width >= NARROW:
        yield remark("± beside tok/s is the error of its ratio to the present steps, over the same prompts.")
    if document.get("means"):
        yield remark(document["means"])
    base = document["baseline_step_ms"]
    if base is None:
        yield remark("No baseline step is known, so there is no break-even (profile measures it by itself).")
    else:
        yield remark(
            f"Baseline step {base:.3f} ms, {1000 / base:.1f} tok/s{_off(document)}; break-even is the accept length "
            "that equals it."
        )
    kept = ", ".join(percent(c) for c in document["acceptance_conditional"])
    yield remark(f"Acceptance by position, if the one before was kept: {kept}")


def _trees(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The trees worth trying; nothing where none can be predicted, which the assumptions say where one was recorded."""
    rows = (document.get("trees") or {}).get("rows") or []
    if not rows:
        return
    yield heading("Trees (steps/top-k/draft tokens), predicted from the draft's ranks")
    measured = any(row["measured_tokens"] is not None for row in rows)
    wide = width >= NARROW
    columns = ["tree", "cycle ms", *([""] if wide else []), "accept", *([""] if wide else [])]
    table = make_table([*columns, *(["measured"] if measured else []), "tok/s", *([""] if wide else [])])
    for row in rows:
        cycle, length, speed = row["cycle_ms"], row["accept_length_tokens"], row["tokens_per_s"]
        cells = [f"{row['steps']}/{row['topk']}/{row['draft_tokens']}", point(cycle, 2)]
        cells += [_error(cycle)] if wide else []
        cells += [point(length, 2), *([_error(length, *accept_range(row["steps"]))] if wide else [])]
        cells += [number(row["measured_tokens"], 2)] if measured else []
        table.add_row(*cells, point(speed, 1), *([_error(row["gain"])] if wide else []))
    yield table
    for line in document["trees"]["assumptions"]:
        yield remark(f"Assumed: {line}.")


def _off(document: Mapping[str, Any]) -> str:
    return ", faster than every step count above" if document["best_steps"] == 0 else ""


def _verify(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    rows = [row for row in document["verify"] if row["once_ms"] + row["width_ms"] > 0]
    if not rows:
        return
    yield heading("Verify by width")
    experts = rows[0]["distinct_experts"] is not None
    columns = ["tokens", "as one token ms", "for its width ms"] if width >= NARROW else ["tokens", "one ms", "width ms"]
    columns += ["distinct experts" if width >= NARROW else "experts"] if experts else []
    read = rows[0]["read_bytes"] is not None and width >= MIDDLE
    table = make_table([*columns, *(["reads: weights", "experts", "KV, MB", "x one token"] if read else [])])
    for row in rows:
        cells = [str(row["width"]), number(row["once_ms"], 2), number(row["width_ms"], 2)]
        cells += [number(row["distinct_experts"], 1)] if experts else []
        if read:
            parts = row["read_bytes"]
            cells += [number(parts[name] / 1e6, 1) for name in ("weights", "experts", "kv")]
            cells.append(number(parts["over_one_token"], 3))
        table.add_row(*cells)
    yield table
    if read:
        yield remark("Bound by memory, a forward would take as many times that of one token as it reads.")


def _answer(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield heading(f"What if: {inert(answer['question'], 200)}")
    here, best = answer["here"], answer["best"]
    if here is None:
        yield _item(f"not known: {answer['reason']}")
    else:
        even = ""
        if here["break_even_tokens"] is not None:
            length = point(here["accept_length_tokens"], 2)
            even = f", break-even {point(here['break_even_tokens'], 2)} for {length} tokens"
        yield _item(f"at {here['steps']} steps: {_gain(here['gain'])}, {point(here['tokens_per_s'], 1)} tok/s{even}")
        if best["steps"] != here["steps"]:
            speed = point(best["tokens_per_s"], 1)
            yield _item(f"at {best['steps']} steps, the best then: {_gain(best['gain'])}, {speed} tok/s")
        if best["speedup"] is not None and best["speedup"]["point"] < 1:
            yield _item("plain decoding would still be faster")
    for line in answer["assumptions"]:
        yield _item(f"assumed: {line}")


def _gain(interval: Mapping[str, Any]) -> str:
    change = f"{100 * (interval['point'] - 1):+.1f} %"
    ends = bounds(interval)
    if ends is None:
        return f"{change} ({no_interval(interval)})"
    return f"{change} [{100 * (ends[0] - 1):+.1f}, {100 * (ends[1] - 1):+.1f}]"


def _actions(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    found = document["actions"]
    if not found:
        yield heading("Nothing is predicted to help: the present setting is as good as this model can see.")
        return
    yield heading(f"{len(found)} thing{'' if len(found) == 1 else 's'} to try")
    yield remark("Sorted by the middle between the predicted gain and its lower end: a wide guess does not come first.")
    for number_, action in enumerate(found, 1):
        yield remark(f"{number_}. {action['title']}: {_gain(action['gain'])}, {_KINDS[action['kind']]}")
        yield _item(action["why"], 3)
        # Not wrapped: a command is copied as a whole.
        yield Text(f"   $ {inert(action['command'], 4000)}", style="cyan", no_wrap=True, overflow="ignore")
