"""What ``specmeter profile`` does: one setting under load, its phases, and the step without speculation beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specmeter
from specmeter.analysis.profile import Baseline, analyse, baseline_from_trace
from specmeter.analysis.stats import Interval
from specmeter.bench.prompts import Prompt, PromptSet
from specmeter.bench.schedule import interleave, warm_up
from specmeter.bench.session import Session, Subject
from specmeter.engines.base import Counters, Setting
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request
from specmeter.trace.rundir import RunWriter

WARM_TOKENS = 24


@dataclass(frozen=True)
class ProfilePlan:
    """How much to run: prompts of ``prompts``, each ``blocks`` times, ``max_tokens`` new tokens each."""

    prompts: PromptSet
    count: int
    blocks: int
    max_tokens: int
    seed: int
    setting: Setting | None
    baseline: str

    def chosen(self) -> tuple[Prompt, ...]:
        """The prompts of this run."""
        return self.prompts.sample(self.count, self.seed)


def profile(subject: Subject, plan: ProfilePlan, writer: RunWriter) -> dict[str, Any]:
    """Runs it, fills the run directory, returns the analysis."""
    engine = subject.engine
    setting = plan.setting or engine.setting_of(subject.spec.command) or Setting.of(2)
    together = plan.baseline == "auto" and engine.can("no_spec")
    settings = [setting, Setting.of(0)] if together else [setting]
    with Session(subject, writer, f"{engine.name} server") as session:
        gained, trace, requests = _run(session, plan, settings)
    base = baseline_from_trace(trace) if together else _other_baseline(subject, plan, writer, requests)
    document = analyse(trace, requests, base)
    document["prompts"] = {"set": plan.prompts.name, "count": plan.count, "max_tokens": plan.max_tokens}
    document["settings"] = setting.as_json()
    document["engine_counters"] = _said(gained)
    writer.write_trace(trace)
    writer.write_requests(requests)
    writer.write_analysis(document)
    writer.write_report(render_analysis(document))
    return document


def _run(session: Session, plan: ProfilePlan, settings: Sequence[Setting]) -> tuple[Counters, Any, list[Request]]:
    engine, prompts = session.subject.engine, plan.chosen()
    session.warm(warm_up(prompts, settings, WARM_TOKENS, engine))
    calls = interleave(prompts, settings, plan.blocks, plan.max_tokens, plan.seed, engine)
    gained = session.measure(calls, "requests")
    return gained, session.trace(), session.requests


def _other_baseline(subject: Subject, plan: ProfilePlan, writer: RunWriter, requests: list[Request]) -> Baseline:
    """The baseline from a second start without speculation, from a saved run, or none."""
    if plan.baseline == "none":
        return Baseline(None, "none", "no baseline was asked for")
    if plan.baseline != "auto":
        return saved_baseline(Path(plan.baseline))
    if not subject.spec.command:
        return Baseline(None, "none", "a running server is not started again without speculation: give --baseline DIR")
    engine = subject.engine
    plain = replace(
        subject, spec=replace(subject.spec, command=engine.with_setting(subject.spec.command, Setting.of(0)))
    )
    child = writer.child("baseline")
    with Session(plain, child, f"{engine.name} server without speculation") as session:
        _, trace, own = _run(session, plan, [Setting.of(0)])
    child.write_trace(trace)
    child.write_requests(own)
    child.finish()
    requests.extend(replace(r, request_id=f"baseline-{r.request_id}", start=1) for r in own)
    return baseline_from_trace(trace)


def saved_baseline(folder: Path) -> Baseline:
    """The baseline step of a saved profile. Raises SpecmeterError when the run has none."""
    step = (specmeter.load(folder).analysis.get("baseline") or {}).get("step_ms")
    if not step:
        raise SpecmeterError(
            f"{folder} holds no baseline step.",
            "It is no profile with a baseline.",
            "Name one, or use --baseline auto.",
        )
    limits = {key: step[key] if step[key] is not None else float("nan") for key in ("low", "point", "high")}
    interval = Interval(**{**step, **limits})
    return Baseline(interval, f"saved run {folder.name}")


def _said(gained: Counters) -> dict[str, Any]:
    """The engine's own counters over the run, beside ours."""
    return {
        "cycles": gained.cycles,
        "drafted_tokens": gained.drafted,
        "accepted_tokens": gained.accepted,
        "accepted_per_position": list(gained.per_position),
        "accept_length_tokens": gained.mean_accept_length,
    }
