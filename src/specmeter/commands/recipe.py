"""``specmeter recipe``: list the recipes there are, show one, check one of your own."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes import loader
from specmeter.recipes.planner import survey
from specmeter.reporters.lines import show_lines


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Subcommands of ``recipe``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the engines that specmeter has a recipe for")
    show = actions.add_parser("show", help="print the recipe of an engine, to start one of your own from")
    show.add_argument("engine", metavar="ENGINE")
    check = actions.add_parser("check", help="check a recipe, and resolve it where its engine is")
    check.add_argument("recipe", type=Path, nargs="+", metavar="FILE")
    check.add_argument("--python", metavar="EXE", help="also resolve it in this interpreter's environment")
    check.add_argument("--path", type=Path, metavar="DIR", help="also resolve it in an unpacked wheel or source tree")
    check.add_argument("--engine", metavar="NAME==V", help="the engine's version, where no metadata says it")
    for action in (listing, check):
        action.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Dispatch to the action."""
    if args.action == "show":
        print(loader.built_in(args.engine).path.read_text(encoding="utf-8"), end="")
        return int(Exit.DONE)
    if args.action == "list":
        return _list(args)
    return _check(args)


def _list(args: argparse.Namespace) -> int:
    recipes = [loader.built_in(name) for name in loader.built_in_engines()]
    rows = [
        {
            "engine": recipe.engine,
            "ranges": [entry["range"] for entry in recipe.data["versions"]],
            "runners": [runner["name"] for runner in recipe.data.get("runner", [])],
            "points": len(recipe.data["point"]),
            "about": recipe.data.get("about", ""),
        }
        for recipe in recipes
    ]
    if args.json:
        _print_json({"recipes": rows})
    else:
        lines = []
        for row in rows:
            ranges = "; ".join(str(item) or "every version" for item in row["ranges"])
            lines.append(f"{row['engine']:10} {ranges:18} {row['points']:3} points  {row['about']}")
        show_lines("\n".join(lines))
    return int(Exit.DONE)


def _check(args: argparse.Namespace) -> int:
    """Exit 1 when a recipe is not valid or a required point of it is missing where it was resolved."""
    try:
        recipes = [loader.load(path) for path in args.recipe]
        plan = None
        if args.python or args.path:
            python = Path(args.python or sys.executable)
            plan = survey(python, args.engine, args.recipe, path=args.path, with_code=False).plan
    except loader.Unreadable:
        raise
    except SpecmeterError as error:
        # For this command a recipe that is wrong is the finding, not a mistake in using it.
        error.exit = Exit.FINDING if error.exit is Exit.USAGE else error.exit
        raise
    refused = [] if plan is None else plan["refused"]
    missing = [item for item in refused if item["required"]]
    facts = [{"path": str(item.path), "engine": item.engine, "points": len(item.data["point"])} for item in recipes]
    if args.json:
        _print_json({"recipes": facts, "places": None if plan is None else len(plan["points"]), "refused": refused})
    else:
        for item in facts:
            print(f"{item['path']}: a valid recipe for {item['engine']} with {item['points']} points")
        if plan is not None:
            print(f"{plan['engine']} {plan['engine_version']}: {len(plan['points'])} places, {len(refused)} refused")
        for entry in refused:
            print(f"refused{' (required)' if entry['required'] else ''}: {entry['name']}: {entry['reason']}")
            for near in entry["nearest"]:
                print(f"         nearest: {near}")
    return int(Exit.FINDING if missing else Exit.DONE)


def _print_json(result: dict[str, Any]) -> None:
    document = {"schema": "specmeter/recipe/1", "version": __version__, "command": "recipe"}
    print(json.dumps({**document, "result": result, "warnings": []}))
