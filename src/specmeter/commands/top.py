"""``specmeter top``: the cycle, tok/s and acceptance of running servers, read from their rings."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.commands.baseline_option import baseline_figures
from specmeter.commands.far_options import links_of
from specmeter.commands.link_options import add_link_arguments
from specmeter.errors import Exit, SpecmeterError
from specmeter.exports.data import needs
from specmeter.live.server import LiveServer, beat
from specmeter.live.view import Line, Shown, plain_text, server_lines
from specmeter.live.watch import Links


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Which server, how often, and the form."""
    add_link_arguments(parser)
    parser.add_argument("--rate", type=float, default=10.0, metavar="HZ", help="looks a second (default: 10)")
    parser.add_argument("--seconds", type=int, default=10, metavar="N", help="figures are over N seconds (default: 10)")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="a saved run with a baseline step, for break-even")
    parser.add_argument("--once", action="store_true", help="look for --seconds, print, end: needs no terminal")


def run(args: argparse.Namespace) -> int:
    """Show until q is pressed, or once."""
    if not 0.1 <= args.rate <= 60:
        raise SpecmeterError(f"--rate {args.rate:g} is out of range", "It is between 0.1 and 60 looks a second.")
    if not 1 <= args.seconds <= 60:
        raise SpecmeterError(f"--seconds {args.seconds} is out of range", "It is between 1 and 60.")
    step_s, _overhead = baseline_figures(args.baseline)
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    shown = Shown(seconds=args.seconds, baseline_ms=step_s * 1e3 if step_s else None, unicode=unicode)
    once = args.once or args.json
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SpecmeterError(
            "top needs a terminal", "Input or output is none.", "Use `specmeter top --once`, or --json, in a pipe."
        )
    with links_of(args) as where:
        if once:
            return _once(where, args, shown)
        _app(where, args.rate, shown)
    return int(Exit.DONE)


def _app(where: Links, rate_hz: float, shown: Shown) -> None:
    try:
        from specmeter.live.app import Top
    except ImportError as error:
        raise needs("textual", "live", "The live view") from error
    Top(where, rate_hz, shown).run()


def _once(where: Links, args: argparse.Namespace, shown: Shown) -> int:
    """Look for as long as the figures are over, then print them."""
    servers = [LiveServer(link, missed=partial(where.lost, link)) for link in where.list()]
    end = time.monotonic() + args.seconds + 1
    while servers and time.monotonic() < end:
        for server in servers:
            server.poll()
        time.sleep(1 / args.rate)
    where.list()  # a connection that was lost meanwhile is an error here
    second = beat(time.perf_counter())
    if args.json:
        result = {"servers": [_document(server, second, shown) for server in servers]}
        head: dict[str, Any] = {"schema": "specmeter/top/1", "version": __version__, "command": "top"}
        print(json.dumps({**head, "result": result, "warnings": []}, allow_nan=False))
        return int(Exit.DONE)
    shown = replace(shown, keys=False)
    lines: list[Line] = [line for server in servers for line in server_lines(server, second, shown)]
    print(plain_text(lines) if lines else "No server: start one with `specmeter run -- CMD`.")
    return int(Exit.DONE)


def _document(server: LiveServer, second: int, shown: Shown) -> dict[str, Any]:
    ranks = []
    for (host, rank, pid), live in sorted(server.ranks.items()):
        recent = live.stats.recent(second, shown.seconds)
        step = recent.plain_ms or shown.baseline_ms
        even = recent.cycle_ms / step if step and recent.cycle_ms else None
        reason = None if recent.seam_ms is not None else "device time is not recorded here"
        ranks.append(
            {"host": host, "rank": rank if rank >= 0 else None, "pid": pid, **asdict(recent),
             "break_even_tokens": even, "seam_reason": reason}
        )  # fmt: skip
    return {
        "link": server.link.id, "engine": server.engine, "armed": server.armed, "fault": server.fault or None,
        "lost_records": server.lost, "ranks": ranks,
    }  # fmt: skip
