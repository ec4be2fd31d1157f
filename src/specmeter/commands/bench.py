"""``specmeter bench``: load against a server, timed from the client's side; no probes."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specmeter import __version__
from specmeter.analysis.profile import SCHEMA
from specmeter.bench.acceptance import acceptance
from specmeter.bench.client import Outcome
from specmeter.bench.load import Load, as_request, lateness_ms, percentiles, raise_failure, summarise
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt, PromptSet
from specmeter.bench.schedule import Sending, call, warm_up, with_unique_prefix
from specmeter.bench.session import Session, session
from specmeter.bench.steady import steady_part, summarise_steady
from specmeter.commands.far_options import place_of
from specmeter.commands.load_options import (
    MOST_REQUESTS,
    add_load_arguments,
    add_probe_arguments,
    chosen_prompts,
    chosen_server,
    probing,
    sending,
    show_saved,
)
from specmeter.control.signals import terminations_interrupt
from specmeter.engines.flags import whole_number
from specmeter.errors import SpecmeterError
from specmeter.reporters.bench_view import bench_sentence
from specmeter.reporters.inert import inert_lines
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.rundir import RunWriter


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    parser.add_argument(
        "--concurrency", default="1", metavar="LIST", help="requests at once, such as 1,4,16 (default: 1)"
    )
    parser.add_argument(
        "--ramp", type=float, default=0.0, metavar="SECONDS",
        help="begin a level's streams evenly over so long; requests begun meanwhile, and those under way when the "
        "first stream runs out of work, are left out of the figures (default: 0: all at once, and all requests count)",
    )  # fmt: skip
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="requests before the first level, never counted (default: 1)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second, arriving by chance (seeded)")
    parser.add_argument("--api", choices=("chat", "completions", "generate"), default="chat", help="(default: chat)")
    parser.add_argument(
        "--unique-prefix", action="store_true",
        help="a seeded line of its own before each request's prompt, so that no prefix cache knows it",
    )  # fmt: skip
    add_load_arguments(parser, requests=24, max_tokens=128)
    add_probe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Drive the load at each level, print the table, save the run.

    Raises SpecmeterError for a level that failed, after the levels before it have been printed and saved.
    """
    results: list[dict[str, Any]] = []
    failure: SpecmeterError | None = None
    prompts, levels, progress = chosen_prompts(args), _levels(args), Progress()
    with terminations_interrupt(), place_of(args) as place:
        spec, how = chosen_server(args, place), probing(args, probes=False, place=place)
        writer = RunWriter.create(args.out, ["specmeter", *sys.argv[1:]], prompts=prompts.name, seed=args.seed)
        try:
            with session(spec, None, writer, how, progress, "server") as running:
                _measure(running, prompts, levels, args, writer, results)
        except SpecmeterError as error:
            if not results:
                raise
            failure = error
        writer.add_facts(**place.facts())
    document = {
        "schema": SCHEMA, "kind": "bench", "version": __version__, "prompts": prompts.name,
        "max_tokens": args.max_tokens, "levels": results,
        "verdict": {"word": "measured", "sentence": bench_sentence(results)},
    }  # fmt: skip
    return _shown(document, failure, writer, args.json)


def _shown(document: dict[str, Any], failure: SpecmeterError | None, writer: RunWriter, as_json: bool) -> int:
    """Saves and prints what was measured; then raises the ``failure`` that ended it, if there is one."""
    results = document["levels"]
    writer.keep_analysis(document, render_analysis(document))
    with writer.postponing():
        writer.finish("complete" if failure is None else "partial")
    failed = sum(level["failed"] for level in results)
    warnings = [f"{failed} requests failed"] if failed else []
    if failure is not None:
        warnings.append(f"the run ended at the level after {_level_name(results[-1])}: {failure.what}")
    code = show_saved("bench", document, warnings, writer, as_json)
    if failure is None:
        return code
    if not as_json:
        raise failure
    # Standard output has its one document already.
    print(inert_lines(f"specmeter: {failure}"), file=sys.stderr)
    return int(failure.exit)


def _level_name(level: dict[str, Any]) -> str:
    return f"{level['concurrency']} at once" if level["rate_per_s"] is None else f"{level['rate_per_s']} a second"


def _levels(args: argparse.Namespace) -> list[Load]:
    if not 0 <= args.ramp < math.inf:
        raise SpecmeterError(f"--ramp is {args.ramp}.", "It must be 0 or a number of seconds above.")
    if not 0 <= args.warmup <= MOST_REQUESTS:
        raise SpecmeterError(f"--warmup is {args.warmup}.", f"It must be 0 or more requests, {MOST_REQUESTS} at most.")
    if args.rate is not None:
        if args.ramp:
            raise SpecmeterError(
                "--ramp goes with --concurrency, not with --rate.", "Requests that arrive by chance have no streams."
            )
        return [Load(rate=args.rate, seed=args.seed, stop_on_error=False)]
    words = [whole_number(word) for word in args.concurrency.split(",")]
    streams = [number for number in words if number is not None and number >= 0]
    if len(streams) < len(words):
        raise SpecmeterError(f"--concurrency {args.concurrency} is no list of numbers.", next_step="Write 1,4,16.")
    return [Load(number, seed=args.seed, stop_on_error=False, ramp_s=args.ramp) for number in streams]


def _measure(
    running: Session,
    prompts: PromptSet,
    levels: list[Load],
    args: argparse.Namespace,
    writer: RunWriter,
    results: list[dict[str, Any]],
) -> None:
    """Each level in turn into ``results``, its requests saved at once.

    Raises SpecmeterError with the reason for a level at which every request fails.
    """
    send, chosen = sending(args), prompts.sample(args.requests, args.seed)
    _warm_up(running, chosen, send, args)
    outcomes: list[Outcome] = []
    for block, load in enumerate(levels):
        prompts_here = (
            [with_unique_prefix(prompt, args.seed, block, index) for index, prompt in enumerate(chosen)]
            if args.unique_prefix
            else chosen
        )
        calls = [call(prompt, None, None, send, block, f"n{index}") for index, prompt in enumerate(prompts_here)]
        before = running.server.metrics()
        result = running.drive("load", calls, load, args.api)
        if all(outcome.error for outcome in result.outcomes):
            raise_failure(result.outcomes, "Every request failed.")
        counted = running.server.metrics().since(before)
        level = {"concurrency": None if load.rate else load.concurrency, "rate_per_s": load.rate}
        late = percentiles(lateness_ms(result.outcomes, load))
        found, steady = summarise(result), result.outcomes
        if load.ramp_s:
            part = steady_part(result.outcomes, result.full_ns)
            found, steady = summarise_steady(result, part, load.ramp_s), part.outcomes
        results.append({**level, **found, "late_ms": late, **acceptance(steady, counted)})
        outcomes += result.outcomes
        writer.keep(requests=[as_request(outcome) for outcome in outcomes])


def _warm_up(running: Session, chosen: Sequence[Prompt], send: Sending, args: argparse.Namespace) -> None:
    """``--warmup`` requests, one at a time, with the prompts in turn. Raises SpecmeterError (exit 4) for a failure."""
    prompts = [chosen[number % len(chosen)] for number in range(args.warmup)]
    calls = [
        replace(each, request_id=f"{each.request_id}-{number}")
        for number, prompt in enumerate(prompts)
        for each in warm_up(prompt, [None], None, send)
    ]
    if calls:
        warm = running.drive("warm-up", calls, api=args.api)
        if warm.outcomes[0].error:
            running.check_death()
        raise_failure(warm.outcomes, "The warm-up failed.")
