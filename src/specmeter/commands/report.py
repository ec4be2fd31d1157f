"""``specmeter report DIR``: the report of a saved run, made again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.terminal import print_analysis
from specmeter.trace.rundir import load


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """The directory and the form of the output."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run directory, as --out made it")
    parser.add_argument("--json", action="store_true", help="print the analysis as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; a run without an analysis is an error."""
    saved = load(args.directory)
    if not saved.analysis:
        raise SpecmeterError(
            f"{args.directory} holds no analysis",
            f"Its run is {saved.run.get('status', 'of unknown state')}.",
            "Look into its logs/ and record again.",
        )
    if args.json:
        document = {
            "schema": "specmeter/report/1",
            "version": __version__,
            "command": "report",
            "result": saved.analysis,
            "warnings": [] if saved.run.get("status") == "complete" else ["the run is not complete"],
        }
        print(json.dumps(document, allow_nan=False))
    else:
        print_analysis(saved.analysis)
        if saved.run.get("status") != "complete":
            print("This run is not complete: it was cut off.")
    return int(Exit.DONE)
