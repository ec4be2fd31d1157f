"""``specmeter sweep``: which step count (and tree) is fastest, each against the baseline with an interval."""

from __future__ import annotations

import argparse

from specmeter.bench.prompts import load_prompts
from specmeter.bench.subject import add_subject_arguments, subject_of
from specmeter.bench.sweeping import SweepPlan, grid, sweep
from specmeter.commands.measure_options import add_load_arguments, check_load, measured
from specmeter.errors import SpecmeterError


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``sweep``."""
    add_load_arguments(parser, count=6, blocks=2, tokens=64)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], metavar="N", help="step counts (default: 1 to 6)"
    )
    parser.add_argument("--topk", type=int, nargs="+", default=[1], metavar="N", help="branches a step (default: 1)")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[], metavar="N", help="sizes of trees")
    parser.add_argument(
        "--starts", type=int, default=3, metavar="N", help="server starts a setting, where it needs them"
    )
    parser.add_argument(
        "--threshold", type=float, default=0.01, metavar="X", help="a difference that matters (default: 0.01, 1 %%)"
    )
    add_subject_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Sweep the grid."""
    check_load(args)
    if args.starts < 1:
        raise SpecmeterError(f"--starts is {args.starts}.", "It must be at least 1.")
    if not 0 <= args.threshold < 1:
        raise SpecmeterError(f"--threshold is {args.threshold}.", "It must lie in 0..1.")
    settings = grid(args.steps, args.topk, args.draft_tokens)
    subject = subject_of(args)
    prompts = load_prompts(args.prompts, args.kinds)
    plan = SweepPlan(
        settings, prompts, args.requests, args.blocks, args.max_tokens, args.seed, args.starts, args.threshold
    )
    return measured(args, "sweep", lambda writer: sweep(subject, plan, writer))
