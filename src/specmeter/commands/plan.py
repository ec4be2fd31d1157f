"""``specmeter plan``: what will be measured in an engine, where it stands in the source, and what is refused."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.commands.source import process_of
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.asking import checked_tree
from specmeter.recipes.planner import survey
from specmeter.reporters.lines import show_lines


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``plan``."""
    parser.add_argument("--python", metavar="EXE", help="the interpreter that runs the server (this one)")
    parser.add_argument("--pid", type=int, metavar="PID", help="a running server, whose interpreter and paths are used")
    parser.add_argument("--engine", metavar="NAME[==V]", help="sglang, vllm or specmeter; otherwise the one installed")
    parser.add_argument("--path", type=Path, metavar="DIR", help="an unpacked wheel or a source tree instead")
    parser.add_argument(
        "--recipe", type=Path, action="append", metavar="F", help="a recipe of your own; may be repeated"
    )
    parser.add_argument("--runner", metavar="NAME", help="only the points of this runner, and those that all share")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Resolve, print the table, and return 1 when a required point is missing."""
    plan = _survey(args)
    if args.runner:
        plan = _only(plan, args.runner)
    if args.json:
        document = {"schema": "specmeter/plan/1", "version": __version__, "command": "plan"}
        print(json.dumps({**document, "result": plan, "warnings": []}))
    else:
        show_lines("\n".join(_plan_lines(plan)))
    missing = [item for item in plan["refused"] if item["required"]]
    return int(Exit.FINDING if missing else Exit.DONE)


def _survey(args: argparse.Namespace) -> dict[str, Any]:
    checked_tree(args.path)
    python, env, first = Path(args.python or sys.executable), None, tuple[str, ...]()
    if args.pid is not None:
        process = process_of(args.pid)
        python, env, first = Path(process.python), process.env, process.first
    return survey(python, args.engine, args.recipe, env, args.path, with_code=False, first=first).plan


def _only(plan: dict[str, Any], runner: str) -> dict[str, Any]:
    """The plan with what belongs to ``runner``, and what all share; no line of it is about another."""
    names = [item["name"] for item in plan["runners"]]
    if runner not in names:
        raise SpecmeterError(f"{plan['engine']} {plan['engine_version']} has no runner {runner!r}: {', '.join(names)}.")
    kept = {key: [item for item in plan[key] if item["runner"] in (None, runner)] for key in ("points", "refused")}
    return {**plan, **kept, "runners": [item for item in plan["runners"] if item["name"] == runner]}


def _plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    python = plan["python"]
    yield f"{plan['engine']} {plan['engine_version']}, Python {python['version']} {python['executable']}"
    for runner in plan["runners"]:
        state = f"lacks {len(runner['required_missing'])} required points" if runner["required_missing"] else "complete"
        yield f"  runner {runner['name']}: {state}. {runner['about']}"
    width = max([len(item["name"]) for item in plan["points"]], default=4)
    file = None
    for point in sorted(plan["points"], key=lambda item: (item["path"], item["line"], item["col"])):
        if point["path"] != file:
            file = point["path"]
            yield from ("", f"{file}  sha256 {point['sha256'][:16]}")
        mark = "*" if point["required"] else " "
        runner = f"[{point['runner']}] " if point["runner"] else ""
        yield f"{point['line']:6} {mark} {point['name']:{width}} {point['role']:10} {runner}{_short(point)}"
    yield from ("", f"{len(plan['points'])} places, {len(plan['refused'])} refused; * required")
    yield from _refused_lines(plan)


def _refused_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    for item in plan["refused"]:
        required = "required point" if item["required"] else "optional point"
        runner = f" [{item['runner']}]" if item["runner"] else ""
        yield f"refused: {item['name']}{runner} ({required}): {item['reason']}"
        for near in item["nearest"]:
            yield f"         nearest: {near}"
    for knob in plan["knobs"]:
        yield f"knob {knob['name']}: {knob['path']}, {knob['low']} to {knob['most']}, turned at {knob['point']}"
    for item in plan["knobs_refused"]:
        yield f"refused: knob {item['name']}: {item['reason']}"


def _short(point: Mapping[str, Any]) -> str:
    text = str(point["text"])
    return text if len(text) <= 72 else text[:71] + "…"
