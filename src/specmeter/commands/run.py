"""``specmeter run -- CMD``: start a server with the runtime in it, dormant until armed."""

from __future__ import annotations

import argparse
import contextlib
import sys

from specmeter.commands.link_options import add_plan_arguments, command_words, link_for
from specmeter.control import Link, launch, processes, remove_link, why_not_up
from specmeter.control.signals import terminations_interrupt, terminations_wait


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``."""
    add_plan_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start the command, pass signals on, return its exit code; a link made here goes when its server has ended."""
    command = command_words(args, needed=True)
    reason = why_not_up(command)
    if reason:
        print(f"specmeter: warning: {reason}", file=sys.stderr)
    with terminations_interrupt():
        link, own = link_for(args, command)
        try:
            print(f"specmeter: link {link.id} ({link.path})", file=sys.stderr)
            code = launch(command, link)
            _say_what_came_up(link, reason)
            return code
        finally:
            if own:
                with terminations_wait():
                    _put_away(link)


def _put_away(link: Link) -> None:
    """Remove the link, unless a process still needs it."""
    rest = processes(link, alive_only=True)
    if not rest:
        remove_link(link)
        return
    pids = ", ".join(str(process.pid) for process in rest)
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"specmeter: link {link.id} stays: process {pids} still runs.", file=sys.stderr)


def _say_what_came_up(link: Link, reason: str | None) -> None:
    """After the server's end: a line for each thing that did not work, none when all did."""
    if not link.path.is_dir():
        return  # somebody has detached it
    found = processes(link)
    if not found:
        why = reason or (
            "Either no process imported a module of the plan, or the runtime was not first on its PYTHONPATH: "
            "another sitecustomize that comes before it, or a PYTHONPATH set anew, keeps it out."
        )
        print(f"specmeter: the runtime did not come up in any process. {why}", file=sys.stderr)
    for process in found:
        for entry in process.report["refused"]:
            print(f"specmeter: process {process.pid}: {entry['module']}: {entry['reason']}", file=sys.stderr)
        for entry in process.report["disarmed"]:
            print(
                f"specmeter: process {process.pid}: point {entry['point']} disarmed itself: {entry['exception']}",
                file=sys.stderr,
            )
