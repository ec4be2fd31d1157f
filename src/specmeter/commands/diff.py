"""``specmeter diff A B``: two saved runs, phase by phase."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specmeter import __version__
from specmeter.analysis.diff import diff_runs
from specmeter.errors import Exit
from specmeter.reporters.diff_view import print_diff
from specmeter.trace.rundir import load


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """The two directories and the form."""
    parser.add_argument("a", metavar="A", type=Path, help="a run directory of `specmeter profile`")
    parser.add_argument("b", metavar="B", type=Path, help="the other one; differences are B - A")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what differs."""
    a, b = load(args.a), load(args.b)
    document = diff_runs(a, b)
    warnings = [f"{run.path} is not complete" for run in (a, b) if run.run.get("status") != "complete"]
    if args.json:
        head = {"schema": "specmeter/diff-result/1", "version": __version__, "command": "diff"}
        print(json.dumps({**head, "result": document, "warnings": warnings}, allow_nan=False))
        return int(Exit.DONE)
    print_diff(document)
    for warning in warnings:
        print(f"note: {warning}")
    return int(Exit.DONE)
