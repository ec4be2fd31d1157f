"""What ``specmeter sweep`` does: a grid of settings against the baseline, interleaved, with intervals."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specmeter import control
from specmeter.analysis.sweep import Arm, analyse_sweep
from specmeter.analysis.sweep_starts import StartCycles, start_cycles
from specmeter.bench.client import Call, Outcome
from specmeter.bench.load import as_request, raise_failure
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending, interleaved, warm_up
from specmeter.bench.session import Probing, Session, planned_link, session
from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.errors import SpecmeterError
from specmeter.reporters.inert import inert
from specmeter.reporters.sweep_view import shortened_words
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request, Trace, load_link
from specmeter.trace.rundir import RunWriter

# An interval over pairs takes two of them.
LEAST_DEALS = 2
# Blocks or starts: nobody waits for more, and their plan is laid out before the first.
MOST_PASSES = 10_000


@dataclass(frozen=True)
class SweepPlan:
    """The grid and how much of it to run.

    ``blocks`` passes over the prompts; ``starts`` counts server starts a setting where each needs its own; differences
    within ``threshold`` (0.01: 1 %) get no verdict. One start ends early where it would take longer than ``budget_s``
    (None: never), with whole passes over the settings only.
    """

    settings: tuple[Setting, ...]
    prompts: tuple[Prompt, ...]
    blocks: int
    sending: Sending
    starts: int = 3
    threshold: float = 0.01
    budget_s: float | None = None

    def deals(self, settings: Sequence[Setting]) -> list[tuple[int, Prompt, Sequence[Setting]]]:
        """Blocks and prompts in a drawn order, each with the settings to run."""
        rng = random.Random(self.sending.seed)
        return [
            (block, prompt, settings)
            for block in range(self.blocks)
            for prompt in rng.sample(list(self.prompts), len(self.prompts))
        ]


@dataclass
class Gathered:
    """What the starts gave so far; ``starts`` holds by setting what was seen in starts of its own, ``notes`` what
    their traces warn of."""

    requests: list[Request]
    outcomes: list[Outcome]
    trace: Trace | None = None
    shortened: dict[str, Any] | None = None
    starts: dict[str, list[StartCycles]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, trace: Trace, where: str = "") -> None:
        """Keep what a trace warns of, as inert text; ``where`` it was recorded comes before it."""
        self.notes += [inert(f"{where}{text}", 400) for text in trace.warnings]


def grid(steps: Sequence[int], topk: Sequence[int], draft_tokens: Sequence[int]) -> tuple[Setting, ...]:
    """The baseline, and each step count as a chain and, for every top-k above 1, as a tree of each size."""
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


def sweep(
    spec: ServerSpec, how: Probing, plan: SweepPlan, writer: RunWriter, progress: Progress, link: control.Link | None
) -> dict[str, Any]:
    """Runs the grid, fills the run directory, returns the analysis. ``link`` is for the one start that is enough."""
    one = takes_settings(spec)
    gathered = Gathered([], [])
    if one:
        _one_start(spec, how, plan, writer, progress, link, gathered)
    else:
        many_starts(spec, how, plan, writer, progress, gathered)
    document = analyse_sweep(sweep_arms(plan.settings, gathered), plan.threshold)
    document["starts"] = 1 if one else plan.starts
    document["same_output"] = same_output(gathered.outcomes)
    document["shortened"] = gathered.shortened
    document["notes"] = gathered.notes
    writer.keep(requests=gathered.requests)
    writer.keep_analysis(document, render_analysis(document))
    return document


def takes_settings(spec: ServerSpec) -> bool:
    """Whether one start serves every setting."""
    return spec.engine is not None and engine_named(spec.engine).can("per_request")


def sweep_arms(settings: Sequence[Setting], gathered: Gathered) -> list[Arm]:
    """What was gathered, by setting."""
    return [
        Arm(
            s.label,
            {"steps": s.steps, "topk": s.topk, "draft_tokens": s.draft_tokens},
            [r for r in gathered.requests if r.setting == s.label],
            gathered.trace,
            gathered.starts.get(s.label, ()),
        )
        for s in settings
    ]


def _one_start(
    spec: ServerSpec,
    how: Probing,
    plan: SweepPlan,
    writer: RunWriter,
    progress: Progress,
    link: control.Link | None,
    gathered: Gathered,
) -> None:
    with session(spec, link, writer, how, progress, "server") as running:
        if running.link is not None:
            writer.write_plan(running.link.plan())
        _drive(running, plan, plan.settings, gathered, 0, "sweeping")
        if running.link is not None:
            gathered.trace = load_link(running.link.path, gathered.requests)
            gathered.note(gathered.trace)
            writer.keep(gathered.trace)


def _drive(
    running: Session, plan: SweepPlan, settings: Sequence[Setting], gathered: Gathered, start: int, title: str
) -> None:
    """Warm every setting up, then all pairs of prompt and setting, armed."""
    warm = running.drive("warm-up", warm_up(plan.prompts[0], settings, running.engine, plan.sending))
    raise_failure(warm.outcomes, "The warm-up failed.")
    deals: list[list[Call]] = []
    for number, (block, prompt, chosen) in enumerate(plan.deals(settings)):
        # Another order of the settings for each pair of block and prompt, from one seed.
        how = replace(plan.sending, seed=plan.sending.seed + number)
        deals.append(
            [
                replace(call, block=block, seed=plan.sending.seed, request_id=f"s{start}-{number}-{call.setting}")
                for call in interleaved([prompt], chosen, running.engine, how)
            ]
        )
    with running.armed():
        outcomes, done = paced(lambda calls: _sent(running, title, calls), deals, plan.budget_s)
    if done < len(deals):
        gathered.shortened = {"passes": done, "planned": len(deals), "budget_s": plan.budget_s}
        running.progress.say(shortened_words(gathered.shortened))
    for outcome in outcomes:
        # Where the setting is fixed at the start, the server's own setting is the one that was asked for.
        label = settings[0].label if len(settings) == 1 else outcome.call.setting
        gathered.requests.append(replace(as_request(outcome, start), setting=label))
    gathered.outcomes += outcomes


def _sent(running: Session, title: str, calls: Sequence[Call]) -> Sequence[Outcome]:
    outcomes = running.drive(title, calls).outcomes
    raise_failure(outcomes)
    return outcomes


def paced(
    send: Callable[[Sequence[Call]], Sequence[Outcome]],
    deals: Sequence[Sequence[Call]],
    budget_s: float | None,
    now: Callable[[], float] = time.monotonic,
) -> tuple[list[Outcome], int]:
    """Send the deals in turn until the next would end after ``budget_s``, but at least two; also how many were sent.

    Without a budget all calls go out together.
    """
    if budget_s is None:
        return list(send([call for deal in deals for call in deal])), len(deals)
    began, outcomes, done = now(), list[Outcome](), 0
    for deal in deals:
        if done >= LEAST_DEALS and (now() - began) * (done + 1) / done > budget_s:
            break
        outcomes += send(deal)
        done += 1
    return outcomes, done


def many_starts(
    spec: ServerSpec, how: Probing, plan: SweepPlan, writer: RunWriter, progress: Progress, gathered: Gathered
) -> None:
    """A server start for every setting in every round, in a drawn order; the start is the unit of the comparison."""
    if not spec.command or spec.engine is None:
        raise SpecmeterError(
            "This engine takes no settings with a request, so each needs a start of its own.",
            "A running server was given.",
            "Give the server's command after `--`.",
        )
    engine, rng = engine_named(spec.engine), random.Random(plan.sending.seed)
    order = [s for _ in range(plan.starts) for s in rng.sample(list(plan.settings), len(plan.settings))]
    for number, setting in enumerate(order):
        progress.say(f"start {number + 1} of {len(order)}: {setting.label}")
        own = replace(spec, command=engine.with_setting(spec.command, setting))
        child = writer.child(f"start-{number}-{setting.label}")
        with session(own, planned_link(own, how), child, how, progress, "server") as running:
            writer.add_facts(model=running.model)
            _drive(running, plan, [setting], gathered, number, setting.label)
            if running.link is not None:
                with child.postponing():
                    child.write_plan(running.link.plan())
                _keep_start(running.link, setting.label, number, child, gathered, progress)
        with child.postponing():
            child.finish("complete")
        writer.failure = writer.failure or child.failure


def _keep_start(
    link: control.Link, label: str, number: int, child: RunWriter, gathered: Gathered, progress: Progress
) -> None:
    """The start's cycles into its own run, and their means to those of its setting; the speeds stand without them."""
    requests = [r for r in gathered.requests if r.start == number]
    try:
        trace = load_link(link.path, requests)
    except SpecmeterError as error:
        progress.say(f"no cycles of this start: {error.what}")
        return
    gathered.note(trace, f"start {number + 1}, {label}: ")
    child.keep(trace)
    found = start_cycles(trace, requests)
    if found is not None:
        gathered.starts.setdefault(label, []).append(found)


def same_output(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many greedy answers equal the baseline's to the letter, and how many groups of repeats agree.

    Plain and speculative decoding run batches of other shapes, so in bfloat16 a near-tie may fall the other way.
    """
    texts: dict[tuple[str, str], set[str]] = {}
    for outcome in outcomes:
        texts.setdefault((outcome.call.setting, outcome.call.prompt.prompt_id), set()).add(outcome.text)
    compared = [key for key in texts if key[0] != "baseline" and ("baseline", key[1]) in texts]
    equal = sum(1 for key in compared if texts[key] == texts["baseline", key[1]])
    steady = sum(1 for found in texts.values() if len(found) == 1)
    return {"compared": len(compared), "equal_to_baseline": equal, "repeatable": steady, "groups": len(texts)}
