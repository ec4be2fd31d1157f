"""``specmeter metrics``: figures of running servers, or of a saved run, for Prometheus."""

from __future__ import annotations

import argparse
import ipaddress
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specmeter.commands.baseline_option import baseline_figures
from specmeter.control import find_link
from specmeter.control.signals import terminations_interrupt
from specmeter.errors import Exit, SpecmeterError
from specmeter.exports.figures import Figures, run_figures
from specmeter.exports.openmetrics import Collector, openmetrics_text, require_client
from specmeter.live.watch import LinksHere, Watch
from specmeter.reporters.inert import inert
from specmeter.trace.rundir import load
from specmeter.trace.whole import write_whole

LISTEN = "127.0.0.1:9477"
POLL_S = 0.25


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """What to show, and where to."""
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="a saved run, instead of what runs now")
    parser.add_argument("--link", metavar="ID", help="only this link (default: all of this user)")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="a saved run with a baseline step, for break-even")
    parser.add_argument(
        "--listen", metavar="ADDRESS:PORT", help=f"serve /metrics there (default: {LISTEN}; port 0: any)"
    )
    parser.add_argument("--textfile", type=Path, metavar="FILE", help="write an OpenMetrics text file instead")
    parser.add_argument("--every", type=float, default=15.0, metavar="S", help="rewrite the file every S seconds")
    parser.add_argument("--once", action="store_true", help="what the rings hold, and --every seconds more: print, end")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, or write."""
    if args.listen and (args.textfile or args.once or args.directory):
        raise SpecmeterError(
            "--listen serves running servers until it is interrupted.", "The other options write once."
        )
    if not 0.25 <= args.every <= 3600:
        raise SpecmeterError(f"--every {args.every:g} is out of range", "It is between 0.25 and 3600 seconds.")
    step_s, overhead = baseline_figures(args.baseline)
    if args.directory:
        _put(
            openmetrics_text([f.with_baseline(step_s, overhead) for f in run_figures(load(args.directory))]),
            args.textfile,
        )
        return int(Exit.DONE)
    # Before anything is waited for or listened on.
    require_client()
    watch = Watch(LinksHere(find_link(args.link) if args.link else None), histograms=True, held=args.once)

    def read() -> list[Figures]:
        return [figures.with_baseline(step_s, overhead) for figures in watch.figures()]

    with terminations_interrupt():
        if args.textfile or args.once:
            return _write(watch, read, args)
        return _serve(watch, read, args.listen or LISTEN)


def _write(watch: Watch, read: Callable[[], Sequence[Figures]], args: argparse.Namespace) -> int:
    while True:
        end = time.monotonic() + args.every
        while time.monotonic() < end:
            watch.poll()
            time.sleep(POLL_S)
        _put(openmetrics_text(read()), args.textfile)
        if args.once:
            return int(Exit.DONE)


def _serve(watch: Watch, read: Callable[[], Sequence[Figures]], where: str) -> int:
    """The client library's own server, in its thread; rings are read in this one."""
    address, port = _where(where)
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(read))
    try:
        server, _thread = start_http_server(port, address, registry)
    except OSError as error:
        raise SpecmeterError(
            f"{inert(where)} cannot be listened on",
            str(error.strerror),
            "Choose another with --listen.",
            Exit.ENVIRONMENT,
        ) from error
    shown = f"[{address}]" if ":" in address else address
    print(f"specmeter metrics: http://{shown}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    if not ipaddress.ip_address(address).is_loopback:
        print(
            "specmeter metrics: others can read it: there is no password on this endpoint", file=sys.stderr, flush=True
        )
    try:
        while True:
            watch.poll()
            time.sleep(POLL_S)
    finally:
        server.shutdown()
        server.server_close()


def _where(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    address = address.strip("[]") or "127.0.0.1"
    if address == "localhost":
        address = "127.0.0.1"
    try:
        ipaddress.ip_address(address)
        if not 0 <= int(port) <= 65535:
            raise ValueError
    except ValueError:
        raise SpecmeterError(
            f"--listen {inert(text)} is no address and port", next_step=f"As in --listen {LISTEN}."
        ) from None
    return address, int(port)


def _put(text: str, path: Path | None) -> None:
    """Write a file whole (0600), or print."""
    if path is None:
        print(text, end="")
        return
    write_whole(path, text)
