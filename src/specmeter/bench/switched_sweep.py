"""A sweep whose settings are switched inside one start; the fastest and plain decoding then get starts of their own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specmeter import control
from specmeter.analysis.sweep import Arm, analyse_sweep, compare
from specmeter.bench.client import Call, Outcome
from specmeter.bench.load import as_request
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import call, warm_up
from specmeter.bench.session import Probing, session
from specmeter.bench.sweeping import Gathered, SweepPlan, many_starts, same_output, sweep, sweep_arms, takes_settings
from specmeter.bench.switching import KNOB, NEAR_BASELINE, CannotSwitch, Switch, SwitchedServer, label_of, prepare
from specmeter.engines import ServerSpec, Setting
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import load_link
from specmeter.trace.rundir import RunWriter


def sweep_in_fewest_starts(
    spec: ServerSpec,
    how: Probing,
    plan: SweepPlan,
    writer: RunWriter,
    progress: Progress,
    link: control.Link | None,
    separate: bool = False,
) -> dict[str, Any]:
    """Runs the grid in one start where settings travel with a request or can be switched, else in starts of their own.

    ``separate`` leaves switching out. ``plan.starts`` are those of each setting, or after switching those of the
    fastest setting and of plain decoding (0: none, and no verdict).
    """
    if not takes_settings(spec) and not separate:
        try:
            server = prepare(spec, how, plan.settings, whole=how.probes)
            return _switched(server, spec, how, plan, writer, progress)
        except CannotSwitch as reason:
            progress.say(f"each setting gets starts of its own: {reason}")
    return sweep(spec, how, replace(plan, starts=max(1, plan.starts)), writer, progress, link)


def _switched(
    server: SwitchedServer, spec: ServerSpec, how: Probing, plan: SweepPlan, writer: RunWriter, progress: Progress
) -> dict[str, Any]:
    gathered = Gathered([], [])
    verified = _one_start(server, how, plan, writer, progress, gathered)
    arms = _arms(plan, gathered)
    document = analyse_sweep(arms, plan.threshold, NEAR_BASELINE)
    best = _fastest(document, {setting.label: setting for setting in plan.settings if setting.steps})
    own = Gathered([], [])
    if best is not None and plan.starts:
        many_starts(spec, how, replace(plan, settings=(Setting.of(0), best)), writer, progress, own)
    document["one_start"] = {"knob": KNOB, "reference": NEAR_BASELINE, "verified": verified}
    document["starts"] = 1
    document["notes"] = [*gathered.notes, *own.notes]
    document["same_output"] = same_output([*gathered.outcomes, *own.outcomes])
    document |= _confirmed(document, arms, gathered, own, best, plan)
    writer.keep(requests=[*gathered.requests, *(replace(r, start=r.start + 1) for r in own.requests)])
    writer.keep_analysis(document, render_analysis(document))
    return document


def _arms(plan: SweepPlan, gathered: Gathered) -> list[Arm]:
    found = []
    for setting in plan.settings:
        requests = [request for request in gathered.requests if request.setting == label_of(setting)]
        numbers = {"steps": setting.steps, "topk": setting.topk, "draft_tokens": setting.draft_tokens}
        found.append(Arm(label_of(setting), numbers, requests, gathered.trace))
    return found


def _one_start(
    server: SwitchedServer,
    how: Probing,
    plan: SweepPlan,
    writer: RunWriter,
    progress: Progress,
    gathered: Gathered,
) -> list[dict[str, Any]]:
    """All pairs of prompt and setting in one start, the settings of each pair in a drawn order; what was verified."""
    link = server.link
    with session(server.spec, link, writer, how, progress, "server") as running:
        writer.write_plan(link.plan())
        with running.armed():
            switch = Switch(running)
            warm = warm_up(plan.prompts[0], [None] * len(plan.settings), None, plan.sending)
            switch.meet(warm[:1])
            switch.drive("warm-up", [(setting, [one]) for setting, one in zip(plan.settings, warm, strict=True)])
            switch.counted.clear()
            outcomes = switch.drive("sweeping", _groups(plan))
        gathered.outcomes += outcomes
        gathered.requests += [as_request(outcome) for outcome in outcomes]
        gathered.trace = load_link(link.path, gathered.requests)
        gathered.note(gathered.trace)
        writer.keep(gathered.trace)
    return switch.verified()


def _groups(plan: SweepPlan) -> list[tuple[Setting, Sequence[Call]]]:
    groups: list[tuple[Setting, Sequence[Call]]] = []
    for number, (block, prompt, settings) in enumerate(plan.deals(plan.settings)):
        order = random.Random(plan.sending.seed + number).sample(list(settings), len(settings))
        groups += [(setting, [_call(plan, setting, prompt, block, number)]) for setting in order]
    return groups


def _call(plan: SweepPlan, setting: Setting, prompt: Prompt, block: int, number: int) -> Call:
    made = call(prompt, None, None, plan.sending, block, f"s0-{number}-{label_of(setting)}")
    return replace(made, setting=label_of(setting), seed=plan.sending.seed)


def _fastest(document: Mapping[str, Any], settings: Mapping[str, Setting]) -> Setting | None:
    known = [row for row in document["arms"] if row["tokens_per_s"] and row["setting"] in settings]
    best = max(known, key=lambda row: row["tokens_per_s"]["point"], default=None)
    return settings[best["setting"]] if best else None


def _confirmed(
    document: Mapping[str, Any],
    arms: Sequence[Arm],
    gathered: Gathered,
    own: Gathered,
    best: Setting | None,
    plan: SweepPlan,
) -> dict[str, Any]:
    """The fastest setting against plain decoding, each in starts of its own, and what k=0 costs beside the latter."""
    if best is None or not own.requests:
        sentence = f"{document['best']} is the fastest in one start; plain decoding had no starts of its own."
        verdict = {"word": "inconclusive", "sentence": sentence}
        return {"confirmation": None, "near_baseline": None, "verdict": verdict}
    two = sweep_arms([Setting.of(0), best], own)
    found = analyse_sweep(two, plan.threshold)
    ties = [name for name in document["not_told_apart"] if name != NEAR_BASELINE]
    verdict = dict(found["verdict"])
    if ties and document["best"] == best.label:
        verdict["sentence"] = f"{verdict['sentence'][:-1]}; in one start not told apart from it: {', '.join(ties)}."
    by_name = {arm.setting: arm for arm in arms}
    near = _near_baseline(by_name[NEAR_BASELINE], by_name[best.label], two)
    found["starts"] = plan.starts
    found["same_output"] = _same_answers(best.label, gathered.outcomes, own.outcomes)
    return {"confirmation": found, "near_baseline": near, "verdict": verdict}


def _near_baseline(near: Arm, best: Arm, two: Sequence[Arm]) -> dict[str, Any] | None:
    """Rate at k=0 over that of plain decoding: by way of the fastest setting, which ran beside both.

    The interval multiplies two 95 % intervals, so that it holds at 90 % at least (Bonferroni).
    """
    inside, across = compare(near.requests, best.requests), compare(two[1].requests, two[0].requests)
    if inside is None or across is None:
        return None
    point = inside.point * across.point
    low, high = inside.low * across.low, inside.high * across.high
    unit, method = across.unit, "product of the two ratios that share the fastest setting"
    return {"point": point, "low": low, "high": high, "level": 0.9, "n": across.n, "unit": unit, "method": method}


def _same_answers(label: str, switched: Sequence[Outcome], alone: Sequence[Outcome]) -> dict[str, int]:
    """For how many prompts the fastest setting's answers, switched to and in its own starts, are one and the same."""
    ours = _texts(label, switched)
    theirs = _texts(label, alone)
    both = ours.keys() & theirs.keys()
    return {"compared": len(both), "equal": sum(1 for prompt in both if len(ours[prompt] | theirs[prompt]) == 1)}


def _texts(label: str, outcomes: Sequence[Outcome]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for outcome in outcomes:
        if outcome.call.setting == label:
            found.setdefault(outcome.call.prompt.prompt_id, set()).add(outcome.text)
    return found
