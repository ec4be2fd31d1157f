"""``specmeter tune``: the fastest setting for this model, machine and prompts, found with few starts and proven."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from specmeter.bench.place import Place
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.commands.far_options import flags_at, place_of
from specmeter.commands.load_options import (
    add_load_arguments,
    add_probe_arguments,
    chosen_prompts,
    chosen_server,
    probing,
    sending,
    show_saved,
)
from specmeter.commands.sweep import numbers
from specmeter.control.signals import terminations_interrupt
from specmeter.engines import ServerSpec
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.rundir import RunWriter
from specmeter.tune.defaults import read_space, space_for
from specmeter.tune.journal import Journal
from specmeter.tune.outcome import command_line, write_outcome
from specmeter.tune.predict import nccl_verdict, predictions
from specmeter.tune.search import Budget
from specmeter.tune.space import Candidate
from specmeter.tune.trial import LiveRunner
from specmeter.tune.tuning import TunePlan, best_by_level, tune

JOURNAL = "journal.sqlite"
SERVERS = ("NCCL_", "CUDA_", "SGLANG_", "VLLM_")
"""Variables by which servers are told apart."""
LONGEST_TRIAL_S = 7 * 24 * 3600
DEFAULT_TRIALS = 30
"""The search's server starts in a space with flags or variables, where no budget is given."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``tune``."""
    parser.add_argument("--space", type=Path, metavar="FILE", help="a TOML file that narrows or widens the space")
    parser.add_argument(
        "--profile", type=Path, action="append", default=[], metavar="DIR", help="a saved profile for the cost model"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="budget in minutes for all levels, the proof included"
    )
    parser.add_argument(
        "--trials", type=int, metavar="N", help="server starts of a level's search (30 if the space has knobs)"
    )
    parser.add_argument("--journal", type=Path, metavar="PATH", help="go on with this journal (or run directory)")
    parser.add_argument("--concurrency", default="1", metavar="LIST", help="requests at once, such as 1,8 (default: 1)")
    parser.add_argument(
        "--blocks", type=int, default=6, metavar="N", help="passes over the prompts a trial (default: 6)"
    )
    parser.add_argument(
        "--confirm", type=int, default=3, metavar="N", help="proving starts an arm; 0: none (default: 3)"
    )
    parser.add_argument(
        "--confirm-blocks", type=int, default=4, metavar="N", help="passes a proving start (default: 4)"
    )
    parser.add_argument("--threshold", type=float, default=0.01, metavar="X", help="what matters (default: 0.01, 1 %%)")
    parser.add_argument("--separate", action="store_true", help="a start of its own for each setting (vLLM)")
    parser.add_argument("--trial-timeout", type=float, default=1800.0, metavar="S", help="a longer trial hangs")
    add_load_arguments(parser, requests=6, max_tokens=64)
    add_probe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Tune, print the report, write the files for use."""
    _check(args)
    prompts, progress = chosen_prompts(args), Progress()
    chosen = prompts.sample(args.requests, args.seed)
    with terminations_interrupt(), place_of(args) as place:
        spec, how = chosen_server(args, place), probing(args, probes=False, place=place)
        plan = _plan(args, spec, chosen, place)
        writer = RunWriter.create(args.out, ["specmeter", *sys.argv[1:]], prompts=prompts.name, seed=args.seed)
        path = _journal_path(args.journal, writer)
        with Journal(path, plan.facts()) as journal:
            # No one trial may take more than all the minutes.
            limit_s = min(args.trial_timeout, 60 * (args.minutes or math.inf))
            runner = LiveRunner(spec, chosen, plan.sending, how, writer, progress, limit_s, args.separate)
            try:
                document = tune(plan, runner, how, journal, writer, progress)
            except KeyboardInterrupt:
                print(f"\nEvery finished trial is kept. Go on with --journal {path}", file=sys.stderr)
                raise
        document["prompts"] = prompts.name
        document["baseline_is_k0"] = runner.together and not runner.per_request
        writer.add_facts(**place.facts())
        _finish(plan, document, writer)
    return show_saved("tune", document, [], writer, args.json)


def _check(args: argparse.Namespace) -> None:
    for name, low in (("blocks", 2), ("confirm_blocks", 2), ("confirm", 0)):
        if getattr(args, name) < low:
            raise SpecmeterError(f"--{name.replace('_', '-')} is {getattr(args, name)}.", f"It must be at least {low}.")
    if not 0 <= args.threshold < 1 or not 0 < args.trial_timeout <= LONGEST_TRIAL_S:
        raise SpecmeterError(
            f"--threshold is {args.threshold}, --trial-timeout {args.trial_timeout}.",
            f"The first must be at least 0 and below 1, the second above 0 and at most {LONGEST_TRIAL_S} s.",
        )


def _plan(args: argparse.Namespace, spec: ServerSpec, prompts: tuple[Prompt, ...], place: Place) -> TunePlan:
    """The plan; whatever the user's files say wrong is found before anything starts."""
    if not spec.command or spec.engine is None:
        raise SpecmeterError(
            "tune needs the command that starts the server.", "A running server has one setting.", "Give `-- CMD`."
        )
    levels = tuple(dict.fromkeys(numbers(args.concurrency, "concurrency")))
    if not levels or min(levels) < 1:
        raise SpecmeterError(f"--concurrency {args.concurrency} is no list of numbers from 1 on.")
    user = read_space(args.space) if args.space is not None else None
    flags = flags_at(place, spec)
    far = " ".join(place.names)
    # What is exported here is no part of another host's environment.
    exported = {} if far else {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SERVERS)}
    space = space_for(spec, flags, user, nccl_verdict(args.profile), exported)
    trials = args.trials
    if trials is None and args.minutes is None and space.dimensions:
        trials = DEFAULT_TRIALS
    budget = Budget(args.minutes, trials, 3 * args.confirm)
    return TunePlan(
        spec=spec,
        space=space,
        flags=flags,
        prompts=prompts,
        sending=sending(args),
        budget=budget,
        levels=levels,
        blocks=args.blocks,
        confirm_starts=args.confirm,
        confirm_blocks=args.confirm_blocks,
        threshold=args.threshold,
        predict=predictions(args.profile, space.settings) if args.profile else None,
        where=far,
        separate=args.separate,
        exported=exported,
    )


def _journal_path(given: Path | None, writer: RunWriter) -> Path:
    if given is None:
        return writer.path / JOURNAL
    path = given / JOURNAL if given.is_dir() else given
    if not path.is_file():
        raise SpecmeterError(f"There is no journal: {path}", next_step="Name the journal.sqlite of an earlier run.")
    return path


def _finish(plan: TunePlan, document: dict[str, Any], writer: RunWriter) -> None:
    """Files for use, the analysis and the report."""
    winner = document["levels"][0]["winner"]
    settings = best_by_level(document["levels"])
    candidate = _rebuilt(document, plan)
    files: list[str] = []
    with writer.postponing():
        arm = candidate.arm(plan.spec, "tuned")
        files = write_outcome(writer.path, arm, plan.spec.engine or "", settings, plan.flags)
    document["files"] = [str(writer.path / name) for name in files]
    document["command_line"] = command_line(mask_command(winner["command"]), mask_env(winner["env"]))
    writer.keep_analysis(document, render_analysis(document))
    with writer.postponing():
        writer.finish("complete")


def _rebuilt(document: dict[str, Any], plan: TunePlan) -> Candidate:
    """The winner of the first level as a candidate."""
    winner = document["levels"][0]["winner"]
    return Candidate(
        best_by_level(document["levels"])[plan.levels[0]],
        tuple(sorted(winner["flags"].items())),
        tuple(sorted(winner["knobs"].items())),
    )
