"""``specmeter explain --live``: about a minute of load at a running server, no restart, then the same explanation."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specmeter.analysis.profile import Baseline, analyse
from specmeter.bench.load import as_request, raise_failure
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import interleaved, warm_up
from specmeter.bench.session import Session, link_taken, planned_link, session
from specmeter.commands.load_options import chosen_prompts, chosen_server, probing, sending
from specmeter.control.signals import terminations_interrupt
from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.inert import inert
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request, load_link
from specmeter.trace.rundir import RunWriter

PROBED_STEPS = (2, 6)


def profile_live(args: argparse.Namespace, command: Sequence[str], progress: Progress) -> tuple[Path, list[str]]:
    """Load the server for ``args.seconds``, save the run, give its directory and what its trace warns of.

    Where the engine takes settings per request, two further step counts and plain decoding run between; other engines
    are measured at their own setting only, without a baseline.
    Raises SpecmeterError for a server that carries no probes.
    """
    if not 5 <= args.seconds <= 3600:
        raise SpecmeterError(f"--seconds is {args.seconds}.", "It must lie in 5..3600.")
    prompts, spec = chosen_prompts(args), chosen_server(args)
    if not spec.command and spec.link is None:
        raise SpecmeterError(
            "This server carries no probes, so its cycle cannot be seen.",
            "It was not started by specmeter.",
            "Start it with `specmeter run --link ID -- CMD` and give --link ID --url URL.",
            Exit.REFUSED,
        )
    settings, how = _settings(spec), probing(args)
    with terminations_interrupt():
        labels = ["server" if s is None else s.label for s in settings]
        link = planned_link(spec, how)
        with link_taken(link, how):
            writer = RunWriter.create(args.out, command, prompts=prompts.name, seed=args.seed, settings=labels)
        with session(spec, link, writer, how, progress, "server") as running:
            requests = _drive(running, settings, prompts.sample(len(prompts.prompts), args.seed), args, progress)
            assert running.link is not None
            writer.write_plan(running.link.plan())
            writer.save_rings(running.link.path)
            trace = load_link(running.link.path, requests)
        plain = any(s is not None and s.steps == 0 for s in settings)
        reason = "this engine cannot decode plainly without a restart"
        document = analyse(trace, requests, None if plain else Baseline(None, "none", reason), setting="server")
        writer.write_trace(trace)
        writer.write_requests(requests)
        writer.write_analysis(document)
        writer.write_report(render_analysis(document))
        writer.finish("complete")
    return writer.path, [inert(text, 400) for text in trace.warnings]


def _settings(spec: ServerSpec) -> list[Setting | None]:
    """The server's own setting (None), and what else a request may ask of it."""
    engine = engine_named(spec.engine) if spec.engine is not None else None
    if engine is not None and engine.can("per_request"):
        return [None, Setting.of(0), *(Setting.of(k) for k in PROBED_STEPS)]
    return [None]


def _drive(
    running: Session,
    settings: Sequence[Setting | None],
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    progress: Progress,
) -> list[Request]:
    """Blocks of one prompt under every setting, until the time is over and ``args.requests`` prompts were sent."""
    how = sending(args)
    warm = running.drive("warm-up", warm_up(prompts[0], settings, running.engine, how))
    raise_failure(warm.outcomes, "The warm-up failed.")
    requests: list[Request] = []
    began, done = time.monotonic(), 0
    with running.armed():
        while done < args.requests or time.monotonic() - began < args.seconds:
            prompt = prompts[done % len(prompts)]
            calls = [
                replace(call, block=done, request_id=f"b{done}-{call.request_id}")
                for call in interleaved([prompt], settings, running.engine, replace(how, seed=how.seed + done))
            ]
            result = running.drive(f"measuring, {time.monotonic() - began:.0f} of {args.seconds:.0f} s", calls)
            raise_failure(result.outcomes)
            requests += [as_request(outcome) for outcome in result.outcomes]
            done += 1
    return requests
