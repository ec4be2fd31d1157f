"""``specmeter run -- CMD``: start a server with the runtime in it, dormant until armed."""

from __future__ import annotations

import argparse
import sys

from specmeter.commands.link_options import add_plan_arguments, command_words, link_for
from specmeter.control import Link, launch, processes, remove_link, why_not_up


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``."""
    add_plan_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start the command, pass signals on, return its exit code; a link made here goes when its server has ended."""
    command = command_words(args, needed=True)
    reason = why_not_up(command)
    if reason:
        print(f"specmeter: warning: {reason}", file=sys.stderr)
    link, own = link_for(args, command)
    print(f"specmeter: link {link.id} ({link.path})", file=sys.stderr)
    try:
        code = launch(command, link)
        _say_what_came_up(link, reason)
        return code
    finally:
        if own and not processes(link, alive_only=True):
            remove_link(link)


def _say_what_came_up(link: Link, reason: str | None) -> None:
    """After the server's end: a line for each thing that did not work, none when all did."""
    found = processes(link)
    if not found:
        why = reason or "No process imported a module of the plan with the runtime on its PYTHONPATH."
        print(f"specmeter: the runtime did not come up in any process. {why}", file=sys.stderr)
    for process in found:
        for entry in process.report["refused"]:
            print(f"specmeter: process {process.pid}: {entry['module']}: {entry['reason']}", file=sys.stderr)
        for entry in process.report["disarmed"]:
            print(
                f"specmeter: process {process.pid}: point {entry['point']} disarmed itself: {entry['exception']}",
                file=sys.stderr,
            )
