"""What the commands that make or use a link have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from specmeter.commands.device_options import add_device_arguments, device_of
from specmeter.control.link import Link, find_link, links
from specmeter.control.sampling import DEFAULT_BUDGET_PERCENT, Sampling, assumed_sampling, checked_budget
from specmeter.errors import SpecmeterError


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say what to plan for, and the server's command after ``--``."""
    parser.add_argument("--engine", help="engine, or NAME==VERSION; found from the environment when left out")
    parser.add_argument(
        "--python", type=Path, metavar="EXE", help="the server's interpreter, when CMD does not show it"
    )
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="your own recipe instead of the built-in one")
    parser.add_argument("--link", metavar="ID", help="id of the link: an existing one is used, a new one is kept")
    parser.add_argument("--armed", action="store_true", help="probes are in from the first import on")
    add_always_on_arguments(parser)
    parser.add_argument("--records", type=int, metavar="N", help="records a process keeps (32 bytes each)")
    add_device_arguments(parser)
    parser.add_argument("cmd", nargs=argparse.REMAINDER, metavar="-- CMD", help="the server's command line")


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that act on an existing link."""
    parser.add_argument("--link", metavar="ID", help="id or folder of the link; not needed when there is only one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_always_on_arguments(parser: argparse.ArgumentParser) -> None:
    """What probes may cost that stay in while nobody looks, and NVTX ranges."""
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET_PERCENT, metavar="PERCENT",
        help="what armed probes may cost, in percent of the cycle: only some cycles have them (default: 1)",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="when armed, every cycle has the probes, whatever it costs")
    parser.add_argument(
        "--nvtx", action=argparse.BooleanOptionalAction, default=None, help="spans also push NVTX ranges, or no longer"
    )


def sampling_for(args: argparse.Namespace, reason: str) -> Sampling | None:
    """How to arm at first, None for every cycle; ``reason``: why the cost is not known. Raises SpecmeterError."""
    return None if args.full else assumed_sampling(checked_budget(args.budget), reason)


def command_words(args: argparse.Namespace, needed: bool) -> list[str]:
    """The words after ``--``. Raises SpecmeterError when there are none and they are needed."""
    words: list[str] = list(args.cmd)
    if words and words[0] == "--":
        words = words[1:]
    elif words:
        raise SpecmeterError(f"Unexpected argument {words[0]!r}", "The server's command comes after `--`.")
    if needed and not words:
        raise SpecmeterError(
            "There is no command to run", next_step="Give it after `--`, as in `specmeter run -- vllm serve MODEL`."
        )
    return words


def link_for(args: argparse.Namespace, command: Sequence[str]) -> tuple[Link, bool]:
    """The link that ``--link`` names if it exists, else a new one; and whether it goes with its server."""
    if args.records is not None and args.records < 1024:
        raise SpecmeterError(f"--records {args.records} is too few", "A ring holds at least 1024 records.")
    sampling = sampling_for(args, "it is not measured at the start") if args.armed else None
    if args.link and any(link.id == args.link for link in links()):
        return find_link(args.link), False
    # The planner is only needed here, and arm, disarm and status should start quickly.
    from specmeter.control.prepare import prepare_link

    link = prepare_link(
        command,
        engine=args.engine,
        python=args.python,
        recipe=args.recipe,
        link_id=args.link,
        armed=args.armed,
        capacity=args.records,
        device_events=device_of(args) is not None,
        device_stamps=device_of(args) == "stamps",
        mix=sampling.as_json() if sampling is not None else None,
        nvtx=bool(args.nvtx),
    )
    return link, args.link is None
