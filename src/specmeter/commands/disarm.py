"""``specmeter disarm``: put the original code objects back, in every process of a link."""

from __future__ import annotations

import argparse

from specmeter.commands.link_options import add_link_arguments
from specmeter.commands.status import print_outcome
from specmeter.control import disarm, find_link


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``disarm``."""
    add_link_arguments(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for an answer")
    parser.add_argument("--take-over", action="store_true", help="disarm although another controller runs")


def run(args: argparse.Namespace) -> int:
    """Disarm, and print what each process answered; exit 4 when one stays silent."""
    link = find_link(args.link)
    return print_outcome("disarm", link, disarm(link, args.timeout, args.take_over), args.json)
