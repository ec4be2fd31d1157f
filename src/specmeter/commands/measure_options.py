"""What profile, sweep and demo have in common: the load's options, and how a run ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.terminal import print_analysis
from specmeter.trace.rundir import RunWriter


def add_load_arguments(parser: argparse.ArgumentParser, count: int, blocks: int, tokens: int) -> None:
    """The options of the load, with this command's defaults."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--prompts", metavar="FILE", help="JSONL, ShareGPT or OpenAI messages (default: the built-in set)"
    )
    group.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help="only prompts of these kinds")
    group.add_argument("--requests", type=int, default=count, metavar="N", help=f"prompts (default: {count})")
    group.add_argument("--blocks", type=int, default=blocks, metavar="N", help=f"passes over them (default: {blocks})")
    group.add_argument("--max-tokens", type=int, default=tokens, metavar="N", help=f"new tokens (default: {tokens})")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and order (default: 0)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory (default: a new one below specmeter-runs)"
    )
    parser.add_argument("--json", action="store_true", help="print the analysis as JSON")


def check_load(args: argparse.Namespace) -> None:
    """Raises SpecmeterError for counts out of range."""
    for name, low in (("requests", 1), ("blocks", 1), ("max_tokens", 8)):
        if getattr(args, name) < low:
            raise SpecmeterError(f"--{name.replace('_', '-')} is {getattr(args, name)}.", f"It must be at least {low}.")


def measured(args: argparse.Namespace, command: str, work: Callable[[RunWriter], dict[str, Any]]) -> int:
    """Do ``work`` in a new run directory, then print its report. A run that is cut short stays marked partial."""
    writer = RunWriter.create(args.out, sys.argv, env=dict(os.environ))
    with polite_kill():
        try:
            document = work(writer)
        except BaseException:
            print(f"specmeter: what there is so far is in {writer.path} (partial)", file=sys.stderr)
            raise
        writer.finish()
    if args.json:
        head = {"schema": f"specmeter/{command}/1", "version": __version__, "command": command}
        print(json.dumps({**head, "result": {**document, "directory": str(writer.path)}, "warnings": []}))
    else:
        print_analysis(document)
        print(f"Saved in {writer.path} (`specmeter report {writer.path}` shows it again)")
    return int(Exit.DONE)


@contextmanager
def polite_kill() -> Iterator[None]:
    """While inside, SIGTERM unwinds like Ctrl-C, so that servers are stopped and probes taken out."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
