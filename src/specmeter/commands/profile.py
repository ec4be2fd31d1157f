"""``specmeter profile``: where the time of a speculative cycle goes, and whether speculation pays."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specmeter import control
from specmeter.analysis.device_report import with_kept
from specmeter.analysis.profile import Baseline, analyse, baseline_from_trace
from specmeter.analysis.sampling import Share
from specmeter.analysis.saved_baseline import named_step
from specmeter.bench.budget import Budget, measured_share
from specmeter.bench.load import as_request, raise_failure
from specmeter.bench.place import HERE, Place
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending, interleaved, warm_up
from specmeter.bench.session import Probing, Session, link_taken, planned_link, session
from specmeter.commands.budget_options import add_budget_arguments, budget_of
from specmeter.commands.deep_option import add_deep_argument, deep_cycles, deep_document, take_windows
from specmeter.commands.far_options import place_of
from specmeter.commands.known_server import known_server
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
from specmeter.commands.model_folders import models_of
from specmeter.commands.saved_wiring import keep_server, keep_wiring
from specmeter.commands.serve import DEFAULT_STEPS
from specmeter.control.signals import terminations_interrupt
from specmeter.engines import Counters, ServerSpec, Setting, engine_named, refuse_silent
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.check_words import check_sentence, wiring_word
from specmeter.reporters.inert import inert
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request, Trace, load_link
from specmeter.trace.device import device_rings
from specmeter.trace.rundir import RunWriter, load

BASELINE = Setting.of(0)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``profile``."""
    parser.add_argument("--steps", type=int, metavar="N", help="draft steps (default: the server's)")
    parser.add_argument("--topk", type=int, default=1, metavar="N", help="branches a step (default: 1, a chain)")
    parser.add_argument("--draft-tokens", type=int, metavar="N", help="tokens verified a cycle, the root included")
    parser.add_argument("--baseline", default="auto", metavar="auto|none|DIR", help="plain decoding to compare with")
    add_deep_argument(parser)
    add_load_arguments(parser, requests=12, max_tokens=128)
    add_probe_arguments(parser)
    add_budget_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Profile, print the report, save the run."""
    with terminations_interrupt(), place_of(args, several=True) as place:
        document, warnings, writer = measure(args, ["specmeter", *sys.argv[1:]], Progress(), place)
    return show_saved("profile", document, warnings, writer, args.json)


@dataclass
class Taken:
    """What one server start gave."""

    requests: list[Request] = field(default_factory=list)
    trace: Trace | None = None
    counted: Counters = field(default_factory=Counters)
    notes: list[str] = field(default_factory=list)
    share: Share | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)


def measure(
    args: argparse.Namespace, command: Sequence[str], progress: Progress, place: Place = HERE
) -> tuple[dict[str, Any], list[str], RunWriter]:
    """Run the whole profile; returns the analysis, warnings, and the run's writer with what could not be saved."""
    prompts = chosen_prompts(args)
    asked = _asked_setting(args)
    saved = _saved_baseline(args.baseline)
    spec, how = chosen_server(args, place), probing(args, place=place)
    if not spec.command and spec.link is None:
        refuse_silent(how.place.server_at(spec.url or ""))
        raise SpecmeterError(
            "This server carries no probes, so its cycle cannot be seen.",
            "It was not started by specmeter.",
            "Start it with `specmeter run -- CMD` and give --link, or use `specmeter bench --url`.",
            Exit.REFUSED,
        )
    check_settings(spec, [asked] if asked is not None else [])
    deep = deep_cycles(args, place)
    budget = budget_of(args)
    spec, settings = _arms(spec, asked, saved is None and args.baseline == "auto")
    link = planned_link(spec, how)
    with link_taken(link, how):
        known = {"prompts": prompts.name, "prompts_sha256": prompts.sha256, "seed": args.seed}
        writer = RunWriter.create(args.out, command, **known, settings=[_name(s) for s in settings])
        chosen = prompts.sample(args.requests, args.seed)
    taken = _take(spec, link, writer, how, progress, settings, chosen, sending(args), budget, deep=deep)
    assert taken.trace is not None
    requests, warnings = list(taken.requests), list(taken.notes)
    base = saved
    if saved is None and args.baseline == "none":
        base = Baseline(None, "none", "the baseline was not asked for (--baseline none)")
    elif saved is None and BASELINE not in settings:
        budget = budget.again(taken.share)
        base, more, warning = _second_start(spec, how, writer, progress, chosen, sending(args), budget, deep)
        requests += more
        warnings += [warning] if warning else []
    rings = device_rings(writer.path)
    document = analyse(taken.trace, requests, base, _name(settings[0]), rings, taken.share, taken.reports)
    document["prompts"] = {"set": prompts.name, "count": len(chosen), "max_tokens": args.max_tokens}
    document["engine_counters"] = _counters(taken.counted)
    document["deep"] = deep_document(writer, taken.trace, warnings)
    with contextlib.suppress(SpecmeterError):  # a damaged window is among the warnings by now
        server = known_server(str(spec.engine or taken.trace.plan.get("engine") or ""), spec.command or (), requests)
        document = with_kept(document, writer.path, taken.trace, server)
    wiring = keep_wiring(writer, spec, taken.trace.plan) if not place.names else None
    if not place.names:
        keep_server(writer, spec, taken.trace.plan)
    document["wiring"] = {"word": wiring_word(wiring), "sentence": check_sentence(wiring)} if wiring else None
    writer.keep(taken.trace, requests)
    writer.keep_analysis(document, render_analysis(document))
    warnings += place.notes()
    writer.add_facts(**place.facts())
    with writer.postponing():
        writer.finish("complete")
    return document, warnings, writer


def _name(setting: Setting | None) -> str:
    return "server" if setting is None else setting.label


def _asked_setting(args: argparse.Namespace) -> Setting | None:
    """The setting in --steps and its kin, or None for the server's own."""
    if args.steps is None:
        if args.topk != 1 or args.draft_tokens is not None:
            raise SpecmeterError("--topk and --draft-tokens need --steps.")
        return None
    setting = Setting.of(args.steps, args.topk, args.draft_tokens)
    if setting.steps == 0:
        raise SpecmeterError("--steps 0 is plain decoding: it is the baseline, measured beside the setting anyway.")
    return setting


def _arms(spec: ServerSpec, asked: Setting | None, with_baseline: bool) -> tuple[ServerSpec, list[Setting | None]]:
    """The server to start and the settings to send: the baseline too where the engine takes it per request."""
    engine = engine_named(spec.engine) if spec.engine is not None else None
    known = asked or _own_setting(spec)
    if engine is not None and engine.can("per_request"):
        return spec, [known, BASELINE] if with_baseline else [known]
    if asked is not None:
        if engine is None or not spec.command:
            raise SpecmeterError("--steps cannot be changed on this running server.", next_step="Leave --steps out.")
        spec = replace(spec, command=engine.with_setting(spec.command, asked))
    return spec, [known]


def _own_setting(spec: ServerSpec) -> Setting | None:
    """What the server's own command says it runs, so that the run names it; None where it does not say."""
    if spec.engine is None or not spec.command:
        return None
    found = engine_named(spec.engine).setting_of(spec.command)
    if found is None and spec.engine == "embedded" and models_of("embedded", spec.command)[1]:
        found = Setting.of(DEFAULT_STEPS)
    return found if found is not None and found.steps else None


def _take(
    spec: ServerSpec,
    link: control.Link | None,
    writer: RunWriter,
    how: Probing,
    progress: Progress,
    settings: Sequence[Setting | None],
    prompts: Sequence[Prompt],
    send: Sending,
    budget: Budget,
    start: int = 0,
    deep: int = 0,
) -> Taken:
    """One server: warm up, arm, drive, disarm, read the rings."""
    taken = Taken()
    with session(spec, link, writer, how, progress, "server") as running:
        assert running.link is not None
        writer.write_plan(running.link.plan())
        try:
            _drive(running, settings, prompts, send, taken, start, budget)
            taken.notes += take_windows(running, settings, prompts, send, deep, writer)
            taken.reports = [process.report for process in control.processes(running.link)]
        finally:
            with contextlib.suppress(OSError), writer.postponing():
                writer.save_rings(running.link.path)
            with writer.postponing():
                writer.write_requests(taken.requests)
        taken.trace = load_link(running.link.path, taken.requests)
        taken.notes += [inert(text, 400) for text in taken.trace.warnings]
    return taken


def _drive(
    running: Session,
    settings: Sequence[Setting | None],
    prompts: Sequence[Prompt],
    send: Sending,
    taken: Taken,
    start: int,
    budget: Budget,
) -> None:
    warm = running.drive("warm-up", warm_up(prompts[0], settings, running.engine, send))
    raise_failure(warm.outcomes, "The warm-up failed.")
    with running.armed(budget.first(), budget.nvtx):
        taken.share = measured_share(running, budget, prompts, settings[:1], send)
        before = running.server.metrics()
        result = running.drive("measuring", interleaved(prompts, settings, running.engine, send))
        taken.requests += [as_request(outcome, start) for outcome in result.outcomes]
    taken.counted = running.server.metrics().since(before)
    raise_failure(result.outcomes)


def _second_start(
    spec: ServerSpec,
    how: Probing,
    writer: RunWriter,
    progress: Progress,
    prompts: Sequence[Prompt],
    send: Sending,
    budget: Budget,
    deep: int,
) -> tuple[Baseline, list[Request], str]:
    """The baseline from another start of the same command without its speculative flags, under the same probes."""
    if not spec.command or spec.engine is None:
        reason = "a running server cannot be started again without speculation; give --baseline DIR"
        return Baseline(None, "none", reason), [], ""
    plain = replace(spec, command=engine_named(spec.engine).with_setting(spec.command, BASELINE))
    link = planned_link(plain, how)
    with link_taken(link, how):
        child = writer.child("baseline", settings=["baseline"])
    taken = _take(plain, link, child, how, progress, [BASELINE], prompts, send, budget, 1, deep)
    assert taken.trace is not None
    child.keep(taken.trace)
    with child.postponing():
        child.finish("complete")
    writer.failure = writer.failure or child.failure
    warning = "the baseline comes from another server start; equal starts differ by up to 6 %"
    return baseline_from_trace(taken.trace), taken.requests, "; ".join([warning, *taken.notes])


def _saved_baseline(choice: str) -> Baseline | None:
    """The baseline step of a saved run, or None for ``auto`` and ``none``."""
    if choice in ("auto", "none"):
        return None
    return Baseline(named_step(load(Path(choice))), f"saved run {choice}")


def _counters(counted: Counters) -> dict[str, Any]:
    """The engine's own counters over the measured requests, the check on what the probes say."""
    return {
        "cycles": counted.cycles,
        "accepted_tokens": counted.accepted,
        "accepted_per_position": list(counted.per_position),
        "accept_length_tokens": counted.mean_accept_length,
    }
