"""``specmeter report DIR``: all that a saved run reported, made again, as text or as a page."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.analysis.device_report import saved_device
from specmeter.analysis.kernel_classes import read_patterns
from specmeter.commands.known_server import known_of
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.terminal import print_analysis
from specmeter.trace.rundir import Run, load
from specmeter.trace.strict_json import read_json

MOST_JSON_BYTES = 64 * 1024 * 1024
MOST_NAMED = 3


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """The directory and the form of the output."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run directory, as --out made it")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the analysis as JSON")
    form.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no network")
    parser.add_argument(
        "--wiring", type=Path, metavar="FILE", help="what `specmeter check --json` printed, to be drawn in the page"
    )

    parser.add_argument(
        "--kernel-classes", type=Path, metavar="FILE", help="your own patterns for a deep window's kernels, before ours"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report, or write the page; a run without an analysis is an error."""
    if args.wiring is not None and args.html is None:
        raise SpecmeterError("--wiring needs --html", "The wiring is drawn in the page.", "Add --html FILE.")
    saved = load(args.directory)
    patterns = read_patterns(args.kernel_classes) if args.kernel_classes is not None else None
    saved = saved_device(saved, known_of(saved), patterns, again=patterns is not None)
    if args.html is not None:
        return _write_page(saved, args.html, args.wiring)
    if not saved.analysis:
        raise _without_analysis(saved)
    if args.json:
        document = {
            "schema": "specmeter/report/1",
            "version": __version__,
            "command": "report",
            "result": saved.analysis,
            "parts": {name: part.analysis for name, part in _parts(saved).items()},
            "wiring": _wiring(saved) or None,
            "warnings": [] if saved.run.get("status") == "complete" else ["the run is not complete"],
        }
        print(json.dumps(document, allow_nan=False))
    else:
        for part in _parts(saved).values():
            print_analysis(part.analysis)
            print()
        print_analysis(saved.analysis)
        wiring = _wiring(saved)
        if wiring:
            print()
            print_analysis({"kind": "check", **wiring})
        if saved.run.get("status") != "complete":
            print("This run is not complete: it was cut off.")
    return int(Exit.DONE)


def _without_analysis(saved: Run) -> SpecmeterError:
    """The error that says so, and which of the runs below it can be shown."""
    below = []
    for path in sorted((saved.path / "children").glob("*/")):
        with contextlib.suppress(SpecmeterError):
            child = load(path)
            below += [path] if child.analysis and child.run.get("status") == "complete" else []
    why, then = f"Its run is {saved.run.get('status', 'of unknown state')}.", "Look into its logs/ and record again."
    if below:
        why += f" Complete below it: {', '.join(path.name for path in below)}."
        then = " and ".join(f"`specmeter report {shlex.quote(str(path))}`" for path in below[:MOST_NAMED])
        then = f"See {then}" + (", and so on." if len(below) > MOST_NAMED else ".")
    return SpecmeterError(f"{saved.path} holds no analysis", why, then)


def _parts(saved: Run) -> dict[str, Run]:
    """What was reported before the run's own analysis: the profile of a demo."""
    if saved.analysis.get("kind") != "sweep":
        return {}
    return {name: run for name, run in saved.children.items() if name == "profile" and run.analysis}


def _wiring(saved: Run) -> dict[str, Any]:
    return saved.wiring or next((run.wiring for run in _parts(saved).values() if run.wiring), {})


def _write_page(saved: Run, path: Path, wiring: Path | None) -> int:
    from specmeter.reporters.html import write_page

    if path.is_dir():
        raise SpecmeterError(f"{path} is a directory", next_step=f"Write --html {path / 'report.html'}.")
    write_page(saved, path, _read_wiring(wiring) if wiring is not None else None)
    print(f"saved: {path.absolute()}")
    return int(Exit.DONE)


def _read_wiring(path: Path) -> dict[str, Any]:
    """The result of a check's JSON document. Raises SpecmeterError for anything else."""
    again = "Make it with `specmeter check --json`."
    try:
        document = read_json(path, MOST_JSON_BYTES)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SpecmeterError(f"The check's document {path} cannot be read", f"{why.rstrip('.')}.", again) from error
    if not isinstance(document, dict) or document.get("schema") != "specmeter/check/1":
        raise SpecmeterError(f"{path} is no document of a check", next_step=again)
    result = document.get("result")
    if not isinstance(result, dict):
        raise SpecmeterError(f"{path} holds no result", next_step=again)
    return result
