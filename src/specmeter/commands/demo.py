"""``specmeter demo``: the whole of it on the embedded engine, in three minutes on two cores that nobody else uses."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from specmeter.bench.machine import BUSY_CORES, busy_cores
from specmeter.bench.progress import Progress
from specmeter.bench.session import planned_link
from specmeter.bench.sweeping import SweepPlan, sweep
from specmeter.commands import profile
from specmeter.commands.load_options import (
    add_load_arguments,
    add_probe_arguments,
    chosen_prompts,
    chosen_server,
    print_saved,
    probing,
    sending,
)
from specmeter.control.signals import terminations_interrupt
from specmeter.engines import Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.html import save_page
from specmeter.reporters.terminal import print_analysis, print_lines
from specmeter.trace.rundir import RunWriter, load

PROFILED_STEPS = 3
BLOCKS = 2
TREE = Setting.of(3, 4, 8)
REQUESTS, FEW_REQUESTS = 6, 3
# More than a quiet machine of two cores needs, so that only a slow or busy one shortens the sweep.
SWEEP_S = 150.0


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``demo``."""
    add_load_arguments(parser, requests=REQUESTS, max_tokens=64)
    add_probe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Profile one setting, then sweep step counts; one run directory holds both."""
    prompts, progress = chosen_prompts(args), Progress()
    for line in make_room(args, busy_cores(), os.cpu_count() or 1):
        progress.say(line)
    spec = chosen_server(args)
    if spec.engine != "embedded" or not spec.command:
        raise SpecmeterError("demo runs on the embedded engine.", next_step="Use `specmeter profile -- CMD`.")
    with terminations_interrupt():
        writer = RunWriter.create(args.out, ["specmeter", *sys.argv[1:]], prompts=prompts.name, seed=args.seed)
        progress.say(f"1 of 2: where does a cycle of {PROFILED_STEPS} draft steps spend its time, and does it pay?")
        document, _, inner = _profile(args, writer, progress)
        writer.failure = inner.failure
        if not args.json:
            print_analysis(document)
            print()
        progress.say("2 of 2: which step count pays best?")
        settings = (Setting.of(0), *(Setting.of(k) for k in range(1, 7)), TREE)
        plan = SweepPlan(settings, prompts.sample(args.requests, args.seed), BLOCKS, sending(args), budget_s=SWEEP_S)
        how = probing(args)
        swept = sweep(spec, how, plan, writer, progress, planned_link(spec, how))
        known = load(inner.path).run
        writer.add_facts(**{name: known[name] for name in ("server", "versions") if name in known})
        with writer.postponing():
            writer.finish("complete")
    page = save_page(writer.path) if writer.failure is None else None
    if args.json:
        return print_saved("demo", {"profile": document, "sweep": swept}, [], writer)
    print_analysis(swept)
    wiring = load(inner.path).wiring
    if wiring:
        print()
        print_analysis({"kind": "check", **wiring})
    writer.raise_failure()
    lines = [f"saved: {writer.path}", f"all of it again: specmeter report {shlex.quote(str(writer.path))}"]
    print_lines("\n".join([*lines, *([f"page: {page}"] if page is not None else [])]))
    return int(Exit.DONE)


def make_room(args: argparse.Namespace, busy: float | None, cores: int) -> list[str]:
    """Fewer threads where other work keeps ``busy`` of ``cores`` (None: not known), fewer prompts where it keeps all.

    Threads that wait for each other are held up by the slowest, so as many as there are free cores. Changes ``args``
    only where the user chose nothing; returns the lines that say so. Another server than the embedded is left alone.
    """
    if busy is None or busy < BUSY_CORES or args.url or args.link or args.server or args.server_command:
        return []
    said = []
    if args.threads is None:
        args.threads = max(1, int(cores - busy))
        said.append(f"{args.threads} compute thread{'s' if args.threads > 1 else ''} (--threads says otherwise)")
    if cores - busy < 1 and args.requests == REQUESTS:
        args.requests = FEW_REQUESTS
        said.append(f"{FEW_REQUESTS} prompts instead of {REQUESTS}")
    return [f"other work keeps {busy:.1f} of {cores} cores busy, so: {', '.join(said)}"] if said else []


def _profile(
    args: argparse.Namespace, writer: RunWriter, progress: Progress
) -> tuple[dict[str, Any], list[str], RunWriter]:
    children = writer.path / "children"
    children.mkdir(mode=0o700)
    own = {"steps": PROFILED_STEPS, "topk": 1, "draft_tokens": None, "baseline": "auto", "out": children / "profile"}
    return profile.measure(argparse.Namespace(**{**vars(args), **own}), ["specmeter", *sys.argv[1:]], progress)
