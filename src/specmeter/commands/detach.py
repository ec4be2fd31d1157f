"""``specmeter detach``: the runtime out of every process of a link, for good."""

from __future__ import annotations

import argparse

from specmeter.commands.link_options import add_link_arguments
from specmeter.commands.status import code_of, outcome_of, print_json, print_silent
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
    outcome = outcome_of(link, ack)
    alive = [process for process in processes(link, alive_only=True) if not process.report.get("detached")]
    removed = not alive and not args.keep
    if removed:
        remove_link(link)
    if args.json:
        print_json("detach", {**outcome, "removed": removed})
        return int(code_of(ack))
    pids = ", ".join(str(process.pid) for process in ack.done)
    if ack.done:
        print(f"link {link.id}: the runtime is out of process {pids}, which runs on with its own code")
    elif not alive:
        print(f"link {link.id}: none of its processes runs (any more)")
    print_silent(ack)
    if removed:
        print(f"link {link.id} is detached and removed")
    else:
        why = "that process may need it" if alive else f"`specmeter detach --link {link.id}` removes it"
        print(f"link {link.id} is detached; its folder {link.path} stays: {why}")
    return int(code_of(ack))
