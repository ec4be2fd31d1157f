"""``specmeter source``: the very file that a server's environment would import, outlined without importing it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.asking import ask_far, checked_tree
from specmeter.source.process import Process, inspect
from specmeter.source.pyfile import SourceError


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``source``."""
    parser.add_argument("target", metavar="TARGET", help="dotted module, file, or the number of a running process")
    parser.add_argument("--python", metavar="EXE", help="the interpreter of the environment to look in (this one)")
    parser.add_argument("--path", type=Path, metavar="DIR", help="an unpacked wheel or source tree to look in instead")
    parser.add_argument(
        "--module", metavar="NAME", help="with a process: the module to outline, as that process sees it"
    )
    parser.add_argument("--lines", type=_lines, metavar="A:B", help="also print these lines")
    parser.add_argument("--grep", metavar="REGEX", help="only names and calls that this is found in")
    parser.add_argument("--package", action="store_true", help="look at the whole package that TARGET names")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Locate, outline, print."""
    result = _answer(args)
    if args.json:
        document = {"schema": "specmeter/source/1", "version": __version__, "command": "source"}
        print(json.dumps({**document, "result": result, "warnings": []}))
    elif args.package:
        _print_package(result, args.grep)
    elif "process" in result and "outline" not in result:
        _print_process(result["process"])
    else:
        if "process" in result:
            _print_process(result["process"])
        _print_outline(result.get("outline", result))
    return int(Exit.DONE)


def _lines(text: str) -> list[int]:
    first, colon, last = text.partition(":")
    try:
        pair = [int(first or 1), int(last) if last else (10**9 if colon else int(first))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of lines such as 1:15") from None
    if pair[0] < 1 or pair[1] < pair[0]:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range of lines")
    return pair


def _answer(args: argparse.Namespace) -> dict[str, Any]:
    request: dict[str, Any] = {"op": "package" if args.package else "outline", "grep": args.grep, "lines": args.lines}
    if not args.target.isdigit():
        if args.module:
            raise SpecmeterError("--module goes with a process: TARGET is no process number.")
        target = str(Path(args.target).resolve()) if Path(args.target).exists() else args.target
        tree = checked_tree(args.path)
        request.update(target=target, path=str(tree.resolve()) if tree else None)
        # The folder this was called in is no part of another environment's search path.
        return ask_far(Path(args.python or sys.executable), request)
    process = process_of(int(args.target))
    facts = {
        "pid": process.pid,
        "python": process.python,
        "cwd": process.cwd,
        "script": process.script or None,
        "pythonpath": process.env.get("PYTHONPATH"),
    }
    target = args.module or (process.script if process.script.endswith(".py") else None)
    if target is None:
        return {"process": facts}
    request.update(target=target, entries_first=list(process.first))
    answer = ask_far(Path(process.python), request, process.env)
    return answer if args.package else {"process": facts, "outline": answer}


def process_of(pid: int) -> Process:
    """The running process's environment. Raises SpecmeterError with exit 5 when it cannot be read."""
    try:
        return inspect(pid)
    except SourceError as error:
        raise SpecmeterError(
            f"Process {pid} cannot be read.",
            why=error.reason,
            next_step="Name a running Python server of your own, or run this as its user.",
            exit=Exit.ENVIRONMENT,
        ) from None


def _print_process(facts: Mapping[str, Any]) -> None:
    print(f"process {facts['pid']}  {facts['python']}")
    print(f"  folder     {facts['cwd']}")
    if facts["script"]:
        print(f"  script     {facts['script']}")
    if facts["pythonpath"]:
        print(f"  PYTHONPATH {facts['pythonpath']}")
    print()


def _print_outline(result: Mapping[str, Any]) -> None:
    print(result["path"])
    facts = f"{result['size']} bytes, {result['line_count']} lines, {result['encoding']}, {result['newline']}"
    print(f"  {facts}, sha256 {result['sha256'][:16]}" + (", inside a zip archive" if result["zipped"] else ""))
    if "matches" in result:
        for item in result["matches"]:
            _print_match("", item)
    elif "text" not in result:
        _print_definitions(result)
    for number, text in result.get("text", []):
        print(f"{number:6} {text}")


def _print_definitions(result: Mapping[str, Any]) -> None:
    print(f"\nimports ({len(result['imports'])})")
    for item in result["imports"]:
        print(f"{item['line']:6} {item['text']}")
    print(f"\nclasses ({len(result['classes'])}) and functions ({len(result['functions'])})")
    for item in sorted([*result["classes"], *result["functions"]], key=lambda item: item["line"]):
        depth = item["qualname"].replace(".<locals>", "").count(".")
        decorators = "".join(f"@{name} " for name in item["decorators"])
        name = item["qualname"].rpartition(".")[2]
        if "bases" in item:
            text = f"class {name}({', '.join(item['bases'])})" if item["bases"] else f"class {name}"
        else:
            text = f"{'async ' if item['is_async'] else ''}def {name}{item['signature']}"
        print(f"{item['line']:6} {'  ' * depth}{decorators}{text}")


def _print_match(prefix: str, item: Mapping[str, Any]) -> None:
    where = f"  in {item['qualname']}" if item["kind"] == "call" and item["qualname"] else ""
    print(f"{prefix}{item['line']:6} {item['kind']:8} {item['text']}{where}")


def _print_package(result: Mapping[str, Any], pattern: str | None) -> None:
    print(result["path"])
    size = f"{result['files']} files, {result['bytes'] / 1e6:.1f} MB, {result['definitions']} definitions"
    print(f"  {size}; {result['read']} read anew")
    for path, reason in result["unreadable"].items():
        print(f"  not read: {path}: {reason}")
    if pattern:
        last = None
        for item in result["matches"]:
            if item["file"] != last:
                print(f"\n{item['file']}")
                last = item["file"]
            _print_match("", item)
