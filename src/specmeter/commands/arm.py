"""``specmeter arm``: put the probes in, in every process of a link; in some of the cycles only, within a budget."""

from __future__ import annotations

import argparse
import math

from specmeter.commands.link_options import add_always_on_arguments, add_link_arguments, sampling_for
from specmeter.commands.status import print_outcome
from specmeter.control import Ack, Link, Sampling, arm, find_link, mix
from specmeter.errors import SpecmeterError


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``arm``."""
    add_link_arguments(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for an answer")
    parser.add_argument("--take-over", action="store_true", help="arm although somebody else has armed")
    add_always_on_arguments(parser)
    parser.add_argument(
        "--window", type=float, default=10.0, metavar="S",
        help="the most seconds in which their cost is measured under the server's traffic (default: 10)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Arm, measure what a sampled cycle costs, print what each process answered; exit 4 when one stays silent."""
    if not (math.isfinite(args.window) and args.window >= 0):
        raise SpecmeterError(f"--window {args.window:g} is out of range", "It is in seconds, 0 or more.")
    first = sampling_for(args, "it was not measured")
    link = find_link(args.link)
    if not any(point["role"] == "cycle" for point in link.plan()["points"]):
        first = None  # no cycle to draw for
    ack = arm(link, args.timeout, take_over=args.take_over, sampling=first, nvtx=args.nvtx)
    if first is not None and ack.done and not ack.silent and args.window:
        ack = _measured(link, ack, first, args)
    return print_outcome("arm", link, ack, args.json)


def _measured(link: Link, ack: Ack, first: Sampling, args: argparse.Namespace) -> Ack:
    """Measure under the server's own traffic, and go on at the share that the cost allows."""
    try:
        from specmeter.live.share import watch_share
    except ImportError:
        return ack  # on another host: numpy is not sent there
    share = watch_share(link, first, args.budget, args.window)
    return mix(link, first.seed, share.permille, args.timeout, why=share.why, again=True)
