"""What ``specmeter sweep`` does: a grid of settings against the baseline, interleaved, with intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specmeter.analysis.sweep import Arm, analyse_sweep
from specmeter.bench.client import Outcome
from specmeter.bench.profiling import WARM_TOKENS
from specmeter.bench.progress import say
from specmeter.bench.prompts import PromptSet
from specmeter.bench.schedule import interleave, warm_up
from specmeter.bench.session import Session, Subject
from specmeter.engines.base import Setting
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request, Trace
from specmeter.trace.rundir import RunWriter


@dataclass(frozen=True)
class SweepPlan:
    """The grid and how much of it to run; ``starts`` counts server starts a setting where each needs its own."""

    settings: tuple[Setting, ...]
    prompts: PromptSet
    count: int
    blocks: int
    max_tokens: int
    seed: int
    starts: int = 3
    threshold: float = 0.01


def grid(steps: Sequence[int], topk: Sequence[int], draft_tokens: Sequence[int]) -> tuple[Setting, ...]:
    """The baseline, and each step count as a chain and, for every top-k above 1, as a tree of each size that fits."""
    found = [Setting.of(0)]
    for k in steps:
        for branches in topk:
            if branches == 1 or k == 0:
                found.append(Setting.of(k))
                continue
            if not draft_tokens:
                raise SpecmeterError("A tree needs its size.", next_step="Give --draft-tokens with --topk above 1.")
            found += [Setting.of(k, branches, tokens) for tokens in draft_tokens]
    return tuple(dict.fromkeys(found))


def sweep(subject: Subject, plan: SweepPlan, writer: RunWriter) -> dict[str, Any]:
    """Runs the grid, fills the run directory, returns the analysis."""
    one = subject.engine.can("per_request") or subject.engine.can("switch")
    arms, outcomes = _one_start(subject, plan, writer) if one else _many_starts(subject, plan, writer)
    document = analyse_sweep(arms, plan.threshold)
    document["prompts"] = {"set": plan.prompts.name, "count": plan.count, "max_tokens": plan.max_tokens}
    document["starts"] = 1 if one else plan.starts
    document["same_output"] = same_output(outcomes)
    writer.write_requests([request for arm in arms for request in arm.requests])
    writer.write_analysis(document)
    writer.write_report(render_analysis(document))
    return document


def _arms(settings: Sequence[Setting], requests: Sequence[Request], trace: Trace | None) -> list[Arm]:
    return [
        Arm(
            s.label,
            {"steps": s.steps, "topk": s.topk, "draft_tokens": s.draft_tokens},
            [r for r in requests if r.setting == s.label],
            trace,
        )
        for s in settings
    ]


def _one_start(subject: Subject, plan: SweepPlan, writer: RunWriter) -> tuple[list[Arm], list[Outcome]]:
    prompts, engine = plan.prompts.sample(plan.count, plan.seed), subject.engine
    with Session(subject, writer, f"{engine.name} server") as session:
        session.warm(warm_up(prompts, plan.settings, WARM_TOKENS, engine))
        calls = interleave(prompts, plan.settings, plan.blocks, plan.max_tokens, plan.seed, engine)
        session.measure(calls, f"{len(plan.settings)} settings")
        trace = session.trace()
    writer.write_trace(trace)
    return _arms(plan.settings, session.requests, trace), session.outcomes


def _many_starts(subject: Subject, plan: SweepPlan, writer: RunWriter) -> tuple[list[Arm], list[Outcome]]:
    """A server start for every setting in every round, in a drawn order; the start is the unit of the comparison."""
    if not subject.spec.command:
        raise SpecmeterError(
            "This engine takes no settings with a request, so each needs a start of its own.",
            "A running server was given.",
            "Give the server's command after `--`.",
        )
    prompts, engine, rng = plan.prompts.sample(plan.count, plan.seed), subject.engine, random.Random(plan.seed)
    requests: list[Request] = []
    outcomes: list[Outcome] = []
    order = [(r, s) for r in range(plan.starts) for s in rng.sample(list(plan.settings), len(plan.settings))]
    for number, (_, setting) in enumerate(order):
        say(f"start {number + 1} of {len(order)}: {setting.label}")
        spec = replace(subject.spec, command=engine.with_setting(subject.spec.command, setting))
        child = writer.child(f"start-{number}-{setting.label}")
        with Session(replace(subject, spec=spec), child, f"start-{number}") as session:
            session.warm(warm_up(prompts, [setting], WARM_TOKENS, engine))
            session.measure(
                interleave(prompts, [setting], plan.blocks, plan.max_tokens, plan.seed, engine), setting.label
            )
            child.write_trace(session.trace())
        child.write_requests(session.requests)
        child.finish()
        requests += [replace(r, request_id=f"s{number}-{r.request_id}", start=number) for r in session.requests]
        outcomes += session.outcomes
    return _arms(plan.settings, requests, None), outcomes


def same_output(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many greedy answers equal the baseline's to the letter, and within one setting each other's.

    Plain and speculative decoding run batches of other shapes, so in bfloat16 a near-tie may fall the other way.
    """
    texts: dict[tuple[str, str], set[str]] = {}
    for outcome in outcomes:
        texts.setdefault((outcome.call.setting, outcome.call.prompt.prompt_id), set()).add(outcome.text)
    speculative = [(setting, prompt) for setting, prompt in texts if setting != "baseline"]
    compared = [key for key in speculative if ("baseline", key[1]) in texts]
    equal = sum(1 for key in compared if texts[key] == texts["baseline", key[1]])
    steady = sum(1 for found in texts.values() if len(found) == 1)
    return {"compared": len(compared), "equal_to_baseline": equal, "repeatable": steady, "groups": len(texts)}
