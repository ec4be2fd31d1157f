"""``specmeter arm``: put the probes in, in every process of a link."""

from __future__ import annotations

import argparse

from specmeter.commands.link_options import add_link_arguments
from specmeter.commands.status import print_outcome
from specmeter.control import arm, find_link


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``arm``."""
    add_link_arguments(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for an answer")
    parser.add_argument("--take-over", action="store_true", help="arm although somebody else has armed")


def run(args: argparse.Namespace) -> int:
    """Arm, and print what each process answered; exit 4 when one stays silent."""
    link = find_link(args.link)
    return print_outcome("arm", link, arm(link, args.timeout, take_over=args.take_over), args.json)
