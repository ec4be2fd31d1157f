"""``specmeter plan``: what will be measured in an engine, where it stands in the source, and what is refused."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.commands.source import process_of
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.planner import survey


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
        _print_plan(plan)
    missing = [item for item in plan["refused"] if item["required"]]
    return int(Exit.FINDING if missing else Exit.DONE)


def _survey(args: argparse.Namespace) -> dict[str, Any]:
    if args.path is not None and not args.path.is_dir():
        raise SpecmeterError(f"{args.path} is not a folder.", next_step="Name an unpacked wheel or a source tree.")
    python, env, first = Path(args.python or sys.executable), None, tuple[str, ...]()
    if args.pid is not None:
        process = process_of(args.pid)
        python, env, first = Path(process.python), process.env, process.first
    return survey(python, args.engine, args.recipe, env, args.path, with_code=False, first=first).plan


def _only(plan: dict[str, Any], runner: str) -> dict[str, Any]:
    names = [item["name"] for item in plan["runners"]]
    if runner not in names:
        raise SpecmeterError(f"{plan['engine']} {plan['engine_version']} has no runner {runner!r}: {', '.join(names)}.")
    kept = {key: [item for item in plan[key] if item["runner"] in (None, runner)] for key in ("points", "refused")}
    return {**plan, **kept}


def _print_plan(plan: Mapping[str, Any]) -> None:
    print(
        f"{plan['engine']} {plan['engine_version']}, Python {plan['python']['version']} {plan['python']['executable']}"
    )
    for runner in plan["runners"]:
        state = f"lacks {len(runner['required_missing'])} required points" if runner["required_missing"] else "complete"
        print(f"  runner {runner['name']}: {state}. {runner['about']}")
    width = max([len(item["name"]) for item in plan["points"]], default=4)
    file = None
    for point in sorted(plan["points"], key=lambda item: (item["path"], item["line"], item["col"])):
        if point["path"] != file:
            file = point["path"]
            print(f"\n{file}  sha256 {point['sha256'][:16]}")
        mark = "*" if point["required"] else " "
        runner = f"[{point['runner']}] " if point["runner"] else ""
        print(f"{point['line']:6} {mark} {point['name']:{width}} {point['role']:10} {runner}{_short(point)}")
    print(f"\n{len(plan['points'])} places, {len(plan['refused'])} refused; * required")
    for item in plan["refused"]:
        required = "required point" if item["required"] else "optional point"
        runner = f" [{item['runner']}]" if item["runner"] else ""
        print(f"refused: {item['name']}{runner} ({required}): {item['reason']}")
        for near in item["nearest"]:
            print(f"         nearest: {near}")
    for knob in plan["knobs"]:
        print(f"knob {knob['name']}: {knob['path']}, {knob['low']} to {knob['most']}, turned at {knob['point']}")
    for item in plan["knobs_refused"]:
        print(f"refused: knob {item['name']}: {item['reason']}")


def _short(point: Mapping[str, Any]) -> str:
    text = str(point["text"])
    return text if len(text) <= 72 else text[:71] + "…"
