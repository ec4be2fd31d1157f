"""``specmeter compare``: two or more settings, each in server starts of its own, with an interval and a verdict."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specmeter.bench.arms import CompareArm, arms_from_file, arms_from_words, masked_line
from specmeter.bench.comparing import ComparePlan, compare, warnings_of
from specmeter.bench.place import Place
from specmeter.bench.progress import Progress
from specmeter.commands.far_options import place_of
from specmeter.commands.load_options import (
    add_load_arguments,
    add_probe_arguments,
    chosen_prompts,
    chosen_server,
    probing,
    sending,
    show_saved,
)
from specmeter.control.signals import terminations_interrupt
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import RunWriter


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compare``."""
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="[NAME:]WORDS",
        help="a setting of the server below, such as k=2 or k=2,NCCL_ALGO=Tree,--flag=value; the first is the "
        "reference (default: baseline and server, the command as it is)",
    )
    parser.add_argument("--arms", type=Path, metavar="FILE", help="a TOML file: every [server.NAME] is an arm")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="server starts an arm (default: 3)")
    parser.add_argument(
        "--blocks", type=int, default=4, metavar="N", help="passes over the prompts in a start; the first is dropped"
    )
    parser.add_argument("--threshold", type=float, default=0.01, metavar="X", help="what matters (default: 0.01, 1 %%)")
    parser.add_argument("--together", action="store_true", help="all arms in every start, where the engine can")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    add_load_arguments(parser, requests=6, max_tokens=64)
    add_probe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the starts, print the verdict, save the run."""
    prompts = chosen_prompts(args)
    progress = Progress()
    with terminations_interrupt(), place_of(args) as place:
        plan = ComparePlan(
            arms=_arms(args, place),
            prompts=prompts.sample(args.requests, args.seed),
            blocks=args.blocks,
            sending=sending(args),
            starts=args.starts,
            threshold=args.threshold,
            together=args.together,
            concurrency=args.concurrency,
        )
        how = probing(args, probes=False, place=place)
        line = ["specmeter", *masked_line(sys.argv[1:], args.arm)]
        writer = RunWriter.create(args.out, line, prompts=prompts.name, seed=args.seed)
        document = compare(plan, how, writer, progress)
        writer.add_facts(**place.facts())
        if len(set(document["models"].values())) > 1:
            writer.add_facts(model=None)  # the analysis names each arm's
        with writer.postponing():
            writer.finish("complete")
    document["prompts"] = prompts.name
    return show_saved("compare", document, warnings_of(document), writer, args.json)


def _arms(args: argparse.Namespace, place: Place) -> tuple[CompareArm, ...]:
    if args.arms is None:
        return arms_from_words(args.arm or ["baseline", "server"], chosen_server(args, place))
    if args.arm or args.server_command or args.url or args.link or args.server:
        raise SpecmeterError("--arms names all servers itself.", next_step="Leave --arm and the server's command out.")
    return arms_from_file(args.arms)
