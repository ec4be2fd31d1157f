"""The document of ``specmeter explain``: curve, best steps, what-ifs and three actions, from saved runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specmeter import __version__
from specmeter.analysis.acceptance_lengths import recorded_acceptance
from specmeter.analysis.collective_words import Communication, communication
from specmeter.analysis.costmodel import VERIFY_SLACK, fit
from specmeter.analysis.costmodel_bytes import Shape, forward_bytes
from specmeter.analysis.costmodel_curve import Row, best, curve
from specmeter.analysis.costmodel_data import Sample, samples_of
from specmeter.analysis.costmodel_device import device_step, windows_of
from specmeter.analysis.costmodel_document import row_json, trees_json
from specmeter.analysis.costmodel_evidence import Evidence
from specmeter.analysis.costmodel_measured import measured_words
from specmeter.analysis.costmodel_notes import assumptions
from specmeter.analysis.costmodel_seams import saved_seams
from specmeter.analysis.costmodel_trees import predicted_trees
from specmeter.analysis.diff import START_EFFECT
from specmeter.analysis.moe import Experts, distinct_experts
from specmeter.analysis.saved import analysed
from specmeter.analysis.saved_baseline import baseline_step
from specmeter.analysis.stats import Interval
from specmeter.analysis.whatif import Answer, ask
from specmeter.analysis.whatif_actions import Action, Commands, actions, counted_steps
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import Run

SCHEMA = "specmeter/explain/1"
KINDS = ("profile", "sweep", "compare")
MEANS = (
    "Accept lengths count a request's first and last cycle too, and cycle times are those at that length; a profile "
    "leaves these cycles out of both."
)


def evidence_of(
    runs: Sequence[Run],
    now: int | None = None,
    experts: Experts | None = None,
    acceptance: tuple[float, ...] | None = None,
    plain: Run | None = None,
) -> Evidence:
    """What the runs hold for the model. ``now`` None is the profiled step count, or the fastest of those recorded.

    ``plain`` is another run whose plain decoding is theirs too (commands/plain_start.py), a start of its own.

    Raises SpecmeterError for a run of another kind and where the model lacks something that it cannot do without.
    """
    for run in runs:
        kind = run.analysis.get("kind")
        if run.analysis and kind not in KINDS:
            raise SpecmeterError(
                f"{run.path} is a run of kind {kind}.",
                "The cost model is fitted to the cycles of a profile or a sweep.",
                "Record one: specmeter profile --out DIR",
            )
    samples = samples_of(runs, plain)
    if not any(s.steps > 0 and s.topk == 1 for s in samples):
        fit(samples)
    rates = acceptance or _saved_acceptance(runs)
    draft = Evidence(samples, 0, experts, _saved_baseline(runs), rates)
    present = _present(draft, runs, now)
    windows = [window for run in runs for window in windows_of(run)]
    return Evidence(
        samples, present, experts, draft.baseline_ms, rates, _saved_collectives(runs, present),
        str(plain.path) if plain else "", START_EFFECT if plain else 0.0, device_step(windows, samples),
        saved_seams(runs, windows, samples, present),
    )  # fmt: skip


def _saved_collectives(runs: Sequence[Run], now: int) -> Communication | None:
    """What a deep window at ``now`` draft steps saw of collectives, of the first run that has one."""
    for run in runs:
        found = communication(run.analysis)
        if found is not None:
            steps = run.cycles["steps"][analysed(run, run.cycles)]
            drafting = steps[steps > 0]
            if len(drafting) and int(np.median(drafting)) == now:
                return found
    return None


def _present(evidence: Evidence, runs: Sequence[Run], now: int | None) -> int:
    known = sorted({s.steps for s in evidence.chains})
    if now is not None:
        if now < 1:
            raise SpecmeterError(f"--now {now} is no chain.", "It is the draft steps that run at present.")
        evidence.check_steps(now, f"--now {now}")
        return now
    own = [s.steps for s in evidence.chains if s.setting in ("server", "")]
    if own:
        return own[0]
    if len(known) == 1 or runs[0].analysis.get("kind") == "profile":
        return max(evidence.chains, key=lambda s: s.cycles).steps if len(known) > 1 else known[0]
    recorded_acceptance(evidence)
    return best(curve(Evidence(evidence.samples, known[0], evidence.experts, None, evidence.acceptance), known)).steps


def _saved_acceptance(runs: Sequence[Run]) -> tuple[float, ...] | None:
    """Acceptance by position of a run's analysis, for batches above 1, where the table of cycles has sums only."""
    for run in runs:
        positions = (run.analysis.get("acceptance") or {}).get("positions") or []
        rates = [p["conditional"] for p in positions]
        if rates and all(rate is not None for rate in rates):
            return tuple(float(rate) for rate in rates)
    return None


def _saved_baseline(runs: Sequence[Run]) -> Interval | None:
    found = (baseline_step(run.analysis) for run in runs if run.analysis.get("kind") == "profile")
    return next((step for step in found if step is not None), None)


def explain(
    evidence: Evidence,
    steps: Sequence[int],
    questions: Sequence[str],
    commands: Commands,
    facts: Mapping[str, Any],
    shape: Shape | None = None,
    context: float = 0.0,
) -> dict[str, Any]:
    """The whole document; ``facts`` (engine, runs, ...) go in as they are.

    ``shape`` is the target's, for what a verify forward reads with ``context`` tokens of cache.
    """
    rows = curve(evidence, steps)
    model = fit(evidence.samples, evidence.experts)
    now = next(row for row in rows if row.steps == evidence.now)
    cost = model.cycle(evidence.now, now.tokens.point)
    present = {**cost.points, **cost.phases}
    answers = [ask(evidence, question, steps, present) for question in questions]
    top = best(rows)
    trees = predicted_trees(evidence)
    return {
        "schema": SCHEMA,
        "kind": "explain",
        "version": __version__,
        **facts,
        "now_steps": evidence.now,
        "best_steps": 0 if _plain_wins(top) else top.steps,
        "sentence": _told(_sentence(rows, now, top), facts.get("measured")),
        "means": MEANS if any(s.accepts for s in evidence.chains) else "",
        "baseline_step_ms": _baseline(evidence),
        "samples": [_sample(s) for s in evidence.samples],
        "acceptance_conditional": list(recorded_acceptance(evidence)),
        "curve": [row_json(row) for row in rows],
        "trees": trees_json(evidence, trees),
        "verify": _verify(evidence, [row.steps for row in rows], shape, context),
        "what_if": [_answer(answer) for answer in answers],
        "actions": [_action(action) for action in actions(evidence, rows, commands, trees)],
        "assumptions": list(assumptions(evidence)),
        "interval": rows[0].cycle_ms.method,
        "verify_slack": VERIFY_SLACK,
    }


def _plain_wins(top: Row) -> bool:
    """Whether plain decoding is faster than the best step count, as far as a baseline is known."""
    return top.speedup is not None and top.speedup.point < 1


def _off(top: Row) -> str:
    assert top.speedup is not None
    plain = f"plain decoding, {top.tok_s.point / top.speedup.point:.1f} tok/s"
    best_one = f"the best, {counted_steps(top.steps)}, gives {top.tok_s.point:.1f}"
    if top.speedup.high < 1:
        return f"Speculation should be off: every step count is predicted slower than {plain} ({best_one})"
    return f"Speculation should be off: no step count is predicted faster than {plain} ({best_one}, within the error)"


def _told(modelled: str, measured: Mapping[str, Any] | None) -> str:
    """The sentence: what was measured, then what the model says, where it cannot decide what is decided already."""
    if not measured:
        return modelled
    ratio = measured["ratio"]
    if ratio["low"] > 1 or ratio["high"] < 1:
        # The measured rates have settled it: the model's own words on the same question would contradict them.
        pays, against = ("pays", "does not pay") if ratio["low"] > 1 else ("does not pay", "pays")
        modelled = modelled.replace(
            "Whether speculation pays at present is within the error",
            "By the model alone it would be within the error whether that pays",
        ).replace(f"At present speculation {against}", f"By the model alone speculation {against}, unlike measured")
        if pays == "pays":
            modelled = modelled.replace("Speculation should be off: ", "The model, unlike the measurement: ")
    return f"{measured_words(measured)} Modelled: {modelled}"


def _sentence(rows: Sequence[Row], now: Row, top: Row) -> str:
    if _plain_wins(top):
        head = _off(top)
    elif top.steps == now.steps:
        are = "is" if now.steps == 1 else "are"
        range_ = f"{rows[0].steps} to {rows[-1].steps}"
        head = f"{counted_steps(now.steps)} {are} predicted to be the fastest of {range_}"
    else:
        gain = 100 * (top.gain.point - 1)
        sure = top.status if top.gain.low > 1 else f"{top.status}, within the error of no gain"
        head = f"{counted_steps(top.steps)} instead of {now.steps}: {gain:+.0f} % ({sure})"
    if now.break_even is None or now.speedup is None:
        return f"{head}. Without a baseline nobody can say whether speculation pays."
    costs = f"a cycle costs {now.break_even.point:.2f} baseline steps and yields {now.tokens.point:.2f} tokens"
    if now.speedup.low > 1:
        return f"{head}. At present speculation pays: {costs}."
    if now.speedup.high < 1:
        return f"{head}. At present speculation does not pay: {costs}."
    return f"{head}. Whether speculation pays at present is within the error: {costs}."


def _baseline(evidence: Evidence) -> float | None:
    plain = evidence.plain()
    if plain is not None:
        return float(plain.cycle_ms.sum()) / plain.cycles
    return evidence.baseline_ms.point if evidence.baseline_ms else None


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "setting": sample.setting, "steps": sample.steps, "topk": sample.topk, "width": sample.width,
        "batch": sample.batch, "cycles": sample.cycles, "stalled": sample.stalled, "prompts": len(sample.units),
        "cycle_ms": float(sample.cycle_ms.sum()) / sample.cycles,
    }  # fmt: skip


def _verify(evidence: Evidence, steps: Sequence[int], shape: Shape | None, context: float) -> list[dict[str, Any]]:
    model = fit(evidence.samples, evidence.experts)
    out = []
    for k in steps:
        parts = model.verify_parts(k)
        experts = None
        if evidence.experts is not None:
            experts = distinct_experts(evidence.experts, (k + 1) * model.batch)
        read = None
        if shape is not None:
            one, wide = (forward_bytes(shape, n, context, model.batch) for n in (1, k + 1))
            read = {
                "weights": wide.weights,
                "experts": wide.experts,
                "kv": wide.kv,
                "over_one_token": wide.total / one.total,
            }
        out.append({"steps": k, "width": k + 1, "once_ms": parts["once"], "width_ms": parts["width"],
                    "distinct_experts": experts, "read_bytes": read})  # fmt: skip
    return out


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "question": answer.question,
        "here": row_json(answer.here) if answer.here else None,
        "best": row_json(answer.best) if answer.best else None,
        "assumptions": list(answer.assumptions),
        "reason": answer.reason,
    }


def _action(action: Action) -> dict[str, Any]:
    return {
        "title": action.title,
        "kind": action.kind,
        "gain": action.gain.as_json(),
        "command": action.command,
        "why": action.why,
    }
