"""``specmeter sweep``: which step count (and tree) is fastest, each against the baseline with an interval."""

from __future__ import annotations

import argparse
import sys

from specmeter.bench.progress import Progress
from specmeter.bench.session import link_taken, planned_link
from specmeter.bench.sweeping import MOST_PASSES, SweepPlan, grid, takes_settings
from specmeter.bench.switched_sweep import sweep_in_fewest_starts
from specmeter.commands.far_options import place_of
from specmeter.commands.load_options import (
    add_load_arguments,
    add_probe_arguments,
    check_settings,
    chosen_prompts,
    chosen_server,
    probing,
    sending,
    show_saved,
)
from specmeter.commands.saved_wiring import keep_beside
from specmeter.control.signals import terminations_interrupt
from specmeter.engines.flags import whole_number
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import RunWriter


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``sweep``."""
    parser.add_argument(
        "--steps", default="1-6", metavar="LIST", help="step counts such as 1-6 or 1,2,4 (default: 1-6)"
    )
    parser.add_argument("--topk", default="1", metavar="LIST", help="branches a step (default: 1, a chain)")
    parser.add_argument("--draft-tokens", default="", metavar="LIST", help="sizes of trees, the root included")
    parser.add_argument("--blocks", type=int, default=2, metavar="N", help="passes over the prompts (default: 2)")
    parser.add_argument(
        "--starts",
        type=int,
        default=3,
        metavar="N",
        help="server starts a setting, if it needs its own; where one start is switched, of the fastest and of the "
        "baseline (0: neither) (default: 3)",
    )
    parser.add_argument("--separate", action="store_true", help="starts of its own for each setting (vLLM)")
    parser.add_argument("--threshold", type=float, default=0.01, metavar="X", help="what matters (default: 0.01, 1 %%)")
    add_load_arguments(parser, requests=6, max_tokens=64)
    add_probe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Sweep the grid, print the table, save the run."""
    for name, low in (("blocks", 1), ("starts", 0)):
        if not low <= getattr(args, name) <= MOST_PASSES:
            what, why = f"--{name} is {getattr(args, name)}.", f"It must be at least {low}, and {MOST_PASSES} at most."
            raise SpecmeterError(what, why)
    if not 0 <= args.threshold < 1:
        raise SpecmeterError(f"--threshold is {args.threshold}.", "It must be at least 0 and below 1.")
    settings = grid(*(numbers(getattr(args, n), n) for n in ("steps", "topk", "draft_tokens")))
    if all(setting.steps == 0 for setting in settings):
        raise SpecmeterError(
            f"--steps {args.steps} leaves nothing to sweep.",
            "Plain decoding is the baseline, which is measured anyway.",
            "Name a step count above 0, such as 1-6.",
        )
    prompts = chosen_prompts(args)
    chosen = prompts.sample(args.requests, args.seed)
    plan = SweepPlan(settings, chosen, args.blocks, sending(args), args.starts, args.threshold)
    progress = Progress()
    with terminations_interrupt(), place_of(args) as place:
        spec, how = chosen_server(args, place), probing(args, place=place)
        check_settings(spec, settings)
        link = planned_link(spec, how) if takes_settings(spec) else None
        with link_taken(link, how):
            line = ["specmeter", *sys.argv[1:]]
            known = {"prompts": prompts.name, "prompts_sha256": prompts.sha256, "seed": args.seed}
            writer = RunWriter.create(args.out, line, **known)
        document = sweep_in_fewest_starts(spec, how, plan, writer, progress, link, args.separate)
        writer.add_facts(**place.facts())
        if not place.names:
            keep_beside(writer, spec)
        with writer.postponing():
            writer.finish("complete")
    return show_saved("sweep", document, document["notes"], writer, args.json)


def numbers(text: str, name: str) -> list[int]:
    """``1-6`` or ``1,2,4`` as numbers. Raises SpecmeterError for anything else."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, dash, high = part.partition("-")
        first, last = whole_number(low), whole_number(high if dash else low)
        if first is None or last is None:
            raise SpecmeterError(
                f"--{name.replace('_', '-')} {text} is no list of numbers.", next_step="Write 1-6 or 1,2,4."
            )
        span = range(first, last + 1)
        if not span:
            raise SpecmeterError(
                f"--{name.replace('_', '-')} {text} runs backwards: {part}.", next_step=f"Write {high}-{low}."
            )
        if len(found) + len(span) > 64:
            raise SpecmeterError(f"--{name.replace('_', '-')} {text} has more than 64 values.")
        found += span
    return found
