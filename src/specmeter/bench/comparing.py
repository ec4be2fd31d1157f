"""What ``specmeter compare`` does: starts of every arm in a drawn order, blocks in each, and the output's equality."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from specmeter.analysis.compare import DROPPED_BLOCKS, ArmFacts, analyse_compare
from specmeter.bench.arms import CompareArm
from specmeter.bench.client import Call, Outcome
from specmeter.bench.equality import Tie, ask_about_ties, output_equality
from specmeter.bench.knobs import knobs_of, not_held
from specmeter.bench.load import Load, as_request, raise_failure
from specmeter.bench.place import HERE
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.resolved import differences, resolved_arguments
from specmeter.bench.schedule import Sending, call, warm_up
from specmeter.bench.session import Probing, Session, session
from specmeter.bench.sweeping import MOST_PASSES
from specmeter.bench.switching import CannotSwitch, Switch, SwitchedServer, prepare
from specmeter.engines import Engine, Setting, engine_named
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request
from specmeter.trace.rundir import RunWriter


@dataclass(frozen=True)
class ComparePlan:
    """The arms (the first is the reference) and how much of each to run.

    ``starts`` server starts an arm, or in all where ``together`` runs every arm in each of them; ``blocks`` passes over
    the prompts in a start, the first of which is dropped.
    """

    arms: tuple[CompareArm, ...]
    prompts: tuple[Prompt, ...]
    blocks: int
    sending: Sending
    starts: int = 3
    threshold: float = 0.01
    together: bool = False
    concurrency: int = 1

    def __post_init__(self) -> None:
        for name, value, low in (("starts", self.starts, 1), ("blocks", self.blocks, DROPPED_BLOCKS + 1)):
            if not low <= value <= MOST_PASSES:
                why = f"It must be at least {low}, {MOST_PASSES} at most; the first block is dropped."
                raise SpecmeterError(f"--{name} is {value}.", why)
        if self.concurrency < 1:
            raise SpecmeterError(f"--concurrency is {self.concurrency}.", "It must be at least 1.")
        if not 0 <= self.threshold < 1:
            raise SpecmeterError(f"--threshold is {self.threshold}.", "It must be at least 0 and below 1.")
        if self.together:
            _check_together(self.arms)

    def order(self) -> list[tuple[CompareArm, ...]]:
        """The starts of the session: rounds that hold every arm once, in an order drawn by the seed."""
        if self.together:
            return [self.arms] * self.starts
        rng = random.Random(self.sending.seed)
        runs = [1 if arm.spec.url is not None else self.starts for arm in self.arms]
        rounds = [[arm for arm, most in zip(self.arms, runs, strict=True) if n < most] for n in range(self.starts)]
        return [(arm,) for one in rounds for arm in rng.sample(one, len(one))]


def _check_together(arms: Sequence[CompareArm]) -> None:
    first = arms[0].spec
    engine = engine_named(first.engine) if first.engine is not None else None
    if engine is None or not (engine.can("per_request") or engine.can("switch")):
        raise SpecmeterError("--together needs an engine whose settings travel with a request or can be switched.")
    for arm in arms:
        stripped = engine.with_setting(arm.spec.command, Setting.of(0))
        if stripped != engine.with_setting(first.command, Setting.of(0)) or arm.spec.env != first.env:
            raise SpecmeterError(
                f"--together: {arm.name} and {arms[0].name} differ in more than the speculative setting.",
                next_step="Leave --together out: each arm then has starts of its own.",
            )
        if arm.setting is None:
            raise SpecmeterError(f"--together: the setting of {arm.name} is not known.", next_step="Give it as k=N.")


@dataclass
class Gathered:
    """What the starts gave so far."""

    requests: list[Request] = field(default_factory=list)
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    resolved: dict[str, dict[str, str]] = field(default_factory=dict)
    accept_lengths: dict[str, list[float]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    knobs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ties: dict[tuple[str, str], Tie] = field(default_factory=dict)


def compare(plan: ComparePlan, how: Probing, writer: RunWriter, progress: Progress) -> dict[str, Any]:
    """Runs all starts, fills the run directory, returns the analysis. A failed start raises SpecmeterError (exit 4).

    The requests of every finished start are saved at once, so that an interrupted comparison loses only its last.
    """
    gathered = Gathered()
    try:
        run_starts(plan, how, writer, progress, gathered)
    except BaseException:
        _keep_what_there_is(plan, gathered, writer, progress)
        raise
    document = document_of(plan, gathered)
    writer.keep_analysis(document, render_analysis(document))
    return document


def _keep_what_there_is(plan: ComparePlan, gathered: Gathered, writer: RunWriter, progress: Progress) -> None:
    """The analysis of the starts that finished; whatever is wrong with it never hides why the comparison ended."""
    if not gathered.requests:
        return
    try:
        writer.write_analysis(document_of(plan, gathered))
    except Exception as error:
        progress.say(f"the analysis of the finished starts could not be kept: {error}")


def run_starts(plan: ComparePlan, how: Probing, writer: RunWriter, progress: Progress, gathered: Gathered) -> None:
    """All starts of the plan, one after the other, into ``gathered``."""
    order = plan.order()
    for number, arms in enumerate(order):
        progress.say(f"start {number + 1} of {len(order)}: {', '.join(arm.name for arm in arms)}")
        _one_start(plan, how, writer, progress, number, arms, gathered)
        writer.keep(requests=gathered.requests)


def document_of(plan: ComparePlan, gathered: Gathered) -> dict[str, Any]:
    """The analysis of what was gathered, with the design, the differences of arguments and the output's equality."""
    document = analyse_compare([_facts(arm, gathered) for arm in plan.arms], gathered.requests, plan.threshold)
    document["design"] = {
        "starts": plan.starts,
        "blocks": plan.blocks,
        "prompts": len(plan.prompts),
        "together": plan.together,
        "baseline_is_k0": near_baseline(plan),
        "concurrency": plan.concurrency,
        "seed": plan.sending.seed,
        "order": [[arm.name for arm in arms] for arms in plan.order()],
    }
    document["differences"] = differences(gathered.resolved)
    document["models"] = dict(gathered.models)
    document["knobs"] = [{"arm": arm, **row} for arm, rows in gathered.knobs.items() for row in rows]
    reference, warm = plan.arms[0].name, plan.sending.temperature
    document["output"] = output_equality(gathered.outcomes, reference, warm, gathered.ties)
    return document


def _look_at_knobs(arm: CompareArm, resolved: Mapping[str, str], command: bool, gathered: Gathered) -> None:
    """Keep the arm's knobs as this start has them; one that does not hold in any start stays said."""
    rows = [knob.as_json() for knob in knobs_of(arm, resolved, command)]
    before = {row["knob"]: row for row in gathered.knobs.get(arm.name, []) if row["holds"] is False}
    gathered.knobs[arm.name] = [before.get(row["knob"], row) for row in rows]


def warnings_of(document: Mapping[str, Any]) -> list[str]:
    """What the reader of a comparison has to know besides its verdict: other models, knobs that do not hold."""
    return [*other_models(document), *not_held(document.get("knobs") or [])]


def other_models(document: Mapping[str, Any]) -> list[str]:
    """A warning where the arms' servers do not serve one model: their speeds then tell of models, not of settings."""
    models = document.get("models") or {}
    if len(set(models.values())) < 2:
        return []
    each = ", ".join(f"{name} {model}" for name, model in models.items())
    return [f"the arms serve models of different names ({each}): a difference may be the model's and not the setting's"]


def near_baseline(plan: ComparePlan) -> bool:
    """Whether an arm of no drafts is a switched one: the draft's forward still runs, so it is not plain decoding."""
    engines = {arm.spec.engine for arm in plan.arms}
    switched = plan.together and not any(engine_named(name or "").can("per_request") for name in engines)
    return switched and any(arm.setting is not None and arm.setting.steps == 0 for arm in plan.arms)


def _facts(arm: CompareArm, gathered: Gathered) -> ArmFacts:
    lengths = gathered.accept_lengths.get(arm.name, [])
    mean = sum(lengths) / len(lengths) if lengths else None
    return ArmFacts(arm.name, {**arm.facts(), "accept_length_tokens": mean})


def _one_start(
    plan: ComparePlan,
    how: Probing,
    writer: RunWriter,
    progress: Progress,
    number: int,
    arms: Sequence[CompareArm],
    gathered: Gathered,
) -> None:
    together = plan.together
    server = _switched(arms, how) if together else None
    spec, link = (server.spec, server.link) if server else (arms[0].spec, None)
    with session(spec, link, writer, how, progress, f"start-{number}") as running, running.armed():
        switch = Switch(running) if server else None
        _warm_up(plan, running, switch, arms)
        variables = sorted({name for arm in plan.arms for name in arm.spec.env})
        for arm in arms:
            resolved = resolved_arguments(running.server, arm.spec.command, variables, how.place)
            gathered.resolved.setdefault(arm.name, resolved)
            _look_at_knobs(arm, resolved, not together, gathered)
            gathered.models[arm.name] = running.model
        before = running.server.metrics()
        outcomes = _blocks(plan, running, switch, number, arms)
        length = running.server.metrics().since(before).mean_accept_length
        if length is not None and not together:
            gathered.accept_lengths.setdefault(arms[0].name, []).append(length)
        gathered.outcomes += outcomes
        if plan.sending.temperature <= 0 and how.place is HERE:
            ask_about_ties(running, gathered.outcomes, plan.arms[0].name, plan.sending, gathered.ties)
    gathered.requests += [replace(as_request(outcome, number), setting=name) for name, outcome in outcomes]


def _switched(arms: Sequence[CompareArm], how: Probing) -> SwitchedServer | None:
    """A start in which the arms are switched, where they do not travel with the request."""
    engine = engine_named(arms[0].spec.engine or "")
    if engine.can("per_request"):
        return None
    settings = [arm.setting for arm in arms if arm.setting is not None]
    longest = max(arms, key=lambda arm: arm.setting.steps if arm.setting is not None else 0)
    try:
        return prepare(longest.spec, how, settings, whole=False)
    except CannotSwitch as reason:
        raise _not_together(reason) from reason


def _not_together(reason: CannotSwitch) -> SpecmeterError:
    step = "Leave --together out: each arm then has starts of its own."
    return SpecmeterError("--together: the arms cannot be switched in one start.", f"{reason}.", step)


def _warm_up(plan: ComparePlan, running: Session, switch: Switch | None, arms: Sequence[CompareArm]) -> None:
    """One request an arm that is not counted."""
    settings = [arm.setting if plan.together and switch is None else None for arm in arms]
    calls = warm_up(plan.prompts[0], settings, running.engine, plan.sending)
    if switch is None:
        raise_failure(running.drive("warm-up", calls).outcomes, "The warm-up failed.")
        return
    try:
        switch.meet(calls[:1])
    except CannotSwitch as reason:
        raise _not_together(reason) from reason
    switch.drive("warm-up", [(_setting(arm), [one]) for arm, one in zip(arms, calls, strict=True)])


def _setting(arm: CompareArm) -> Setting:
    return arm.setting if arm.setting is not None else Setting.of(0)


def _blocks(
    plan: ComparePlan, running: Session, switch: Switch | None, number: int, arms: Sequence[CompareArm]
) -> list[tuple[str, Outcome]]:
    found: list[tuple[str, Outcome]] = []
    for block in range(plan.blocks):
        rng = random.Random(f"{plan.sending.seed}-{block}")
        prompts = rng.sample(list(plan.prompts), len(plan.prompts))
        # The prompts go in the same order in every start; the arms of one start in another for each prompt.
        calls = [
            (arm, _call(plan, arm, prompt, running.engine, block, number, switch is not None))
            for prompt in prompts
            for arm in random.Random(f"{plan.sending.seed}-{number}-{block}-{prompt.prompt_id}").sample(
                list(arms), len(arms)
            )
        ]
        title = f"block {block + 1} of {plan.blocks}"
        load = Load(plan.concurrency, seed=plan.sending.seed)
        if switch is not None:
            if plan.concurrency > 1:  # no switching among requests that overlap: each arm has all prompts
                order = rng.sample(list(arms), len(arms))
                calls.sort(key=lambda pair: order.index(pair[0]))
            groups = [(_setting(arm), [one for _, one in own]) for arm, own in groupby(calls, key=lambda pair: pair[0])]
            outcomes = tuple(switch.drive(title, groups, load))
        else:
            outcomes = running.drive(title, [one for _, one in calls], load).outcomes
            raise_failure(outcomes)
        names = {one.request_id: arm.name for arm, one in calls}
        found += [(names[outcome.call.request_id], outcome) for outcome in outcomes]
    return found


def _call(
    plan: ComparePlan, arm: CompareArm, prompt: Prompt, engine: Engine | None, block: int, number: int, switched: bool
) -> Call:
    setting = arm.setting if plan.together and not switched else None
    made = call(prompt, setting, engine, plan.sending, block, f"s{number}-{arm.name}")
    # One sampling seed for all blocks: every block is the same work, so that blocks differ by chance alone.
    return replace(made, seed=plan.sending.seed)
