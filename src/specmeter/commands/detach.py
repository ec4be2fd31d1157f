"""``specmeter detach``: the runtime out of every process of a link, for good."""

from __future__ import annotations

import argparse

from specmeter.commands.link_options import add_link_arguments
from specmeter.commands.status import print_outcome
from specmeter.control import detach, find_link, processes, remove_link


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``detach``."""
    add_link_arguments(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for an answer")
    parser.add_argument("--keep", action="store_true", help="keep the link's directory with its rings")


def run(args: argparse.Namespace) -> int:
    """Detach, print what each process answered, and remove the link; exit 4 when a process stays silent."""
    link = find_link(args.link)
    ack = detach(link, args.timeout)
    code = print_outcome("detach", link, ack, args.json)
    alive = [process for process in processes(link, alive_only=True) if not process.report.get("detached")]
    if not alive and not args.keep:
        remove_link(link)
    return code
