"""``specmeter demo``: the whole of it on the embedded engine, in under three minutes on two cores."""

from __future__ import annotations

import argparse
from typing import Any

from specmeter.bench.profiling import ProfilePlan, profile
from specmeter.bench.progress import say
from specmeter.bench.prompts import load_prompts
from specmeter.bench.subject import add_subject_arguments, subject_of
from specmeter.bench.sweeping import SweepPlan, sweep
from specmeter.commands.measure_options import add_load_arguments, check_load, measured
from specmeter.engines.base import Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.terminal import print_analysis
from specmeter.trace.rundir import RunWriter

TREE = (3, 4, 8)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``demo``."""
    add_load_arguments(parser, count=6, blocks=2, tokens=64)
    add_subject_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch, profile, sweep."""
    check_load(args)
    subject = subject_of(args)
    if subject.engine.name != "embedded":
        raise SpecmeterError("demo runs on the embedded engine.", next_step="Use `specmeter profile -- CMD`.")
    _fetch()
    prompts = load_prompts(args.prompts, args.kinds)

    def work(writer: RunWriter) -> dict[str, Any]:
        say("1 of 2: where does a cycle of 3 draft steps spend its time, and does it pay?")
        first = ProfilePlan(prompts, args.requests, 1, args.max_tokens, args.seed, Setting.of(3), "auto")
        child = writer.child("profile")
        document = profile(subject, first, child)
        child.finish()
        if not args.json:
            print_analysis(document)
        say("2 of 2: which step count pays best?")
        settings = (Setting.of(0), *(Setting.of(k) for k in range(1, 7)), Setting.of(*TREE))
        second = SweepPlan(settings, prompts, args.requests, args.blocks, args.max_tokens, args.seed)
        return sweep(subject, second, writer)

    return measured(args, "demo", work)


def _fetch() -> None:
    try:
        from specmeter.commands.fetch import ProgressLine
        from specmeter.eagle.model_store import ensure_model
    except ImportError as error:
        raise SpecmeterError(
            "The embedded engine's packages are not installed.",
            str(error),
            "Run `pip install 'specmeter[engine]'`.",
            Exit.ENVIRONMENT,
        ) from error
    ensure_model(progress=ProgressLine())
