"""``specmeter tune``: the fastest setting for this model, machine and prompts, found with few starts and proven."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmeter.bench.arms import CompareArm
from specmeter.bench.place import Place
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.commands.far_options import flags_at, place_of
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
from specmeter.commands.sweep import numbers
from specmeter.control.signals import terminations_interrupt
from specmeter.engines import ServerSpec
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.rundir import RunWriter
from specmeter.tune.budget import Budget
from specmeter.tune.defaults import read_space, space_for
from specmeter.tune.facts import carried
from specmeter.tune.journal import Journal
from specmeter.tune.outcome import NoTable, command_line, table_of, write_outcome
from specmeter.tune.predict import nccl_verdict, predictions
from specmeter.tune.trial import LiveRunner
from specmeter.tune.tuning import TunePlan, candidates_by_level, tune, warnings_of_tune

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
            runner = LiveRunner(
                plan.spec, chosen, plan.sending, how, writer, progress, args.trial_timeout, args.separate
            )
            try:
                document = tune(plan, runner, how, journal, writer, progress)
            except (KeyboardInterrupt, SpecmeterError):
                with contextlib.suppress(SpecmeterError):
                    if any(True for _ in journal.events("trial")):
                        print(f"\nEvery finished trial is kept. Go on with --journal {path}", file=sys.stderr)
                raise
        document["prompts"] = prompts.name
        document["baseline_is_k0"] = runner.together and not runner.per_request
        writer.add_facts(**place.facts())
        warnings = [*warnings_of_tune(document), *_finish(plan, document, writer)]
    return show_saved("tune", document, warnings, writer, args.json)


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
    check_settings(spec, space.settings)
    plan = TunePlan(
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
        served_model=args.model_name,
    )
    plan.check()
    return plan


def _journal_path(given: Path | None, writer: RunWriter) -> Path:
    if given is None:
        return writer.path / JOURNAL
    path = given / JOURNAL if given.is_dir() else given
    if not path.is_file():
        raise SpecmeterError(f"There is no journal: {path}", next_step="Name the journal.sqlite of an earlier run.")
    return path


def _finish(plan: TunePlan, document: dict[str, Any], writer: RunWriter) -> list[str]:
    """Files for use, the analysis and the report; returns what is to be said of the files."""
    engine = plan.spec.engine or ""
    winners = candidates_by_level(document["levels"])
    spec = replace(plan.spec, env={**carried(plan.exported), **plan.spec.env})
    arms = {level: candidate.arm(spec, "tuned") for level, candidate in winners.items()}
    files: list[str] = []
    with writer.postponing():
        files = write_outcome(writer.path, arms, engine, plan.flags)
    document["files"] = [str(writer.path / name) for name in files]
    for level in document["levels"]:
        run, arm = level["winner"], arms[level["concurrency"]]
        run["env"] = mask_env(arm.spec.env)
        run["command_line"] = command_line(mask_command(arm.spec.command), run["env"])
    document["command_line"] = document["levels"][0]["winner"]["command_line"]
    writer.keep_analysis(document, render_analysis(document))
    with writer.postponing():
        writer.finish("complete")
    return _notes(plan, arms)


def _notes(plan: TunePlan, arms: Mapping[int, CompareArm]) -> list[str]:
    """What is to be said of the files of several levels."""
    notes = []
    if len(arms) > 1:
        first, *others = arms
        scripts = ", ".join(f"tuned-{level}.sh" for level in others)
        notes.append(f"the command above is the one for {first} at once; the others are in {scripts}")
    table = table_of(plan.spec.engine or "", arms, plan.flags)
    if isinstance(table, NoTable) and table.reason:
        notes.append(f"no table of steps by batch size was written: {table.reason}")
    return notes
