"""The three actions worth trying: what each is predicted to bring, how sure that is, and the command that tries it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specmeter.analysis.acceptance_lengths import recorded_acceptance
from specmeter.analysis.costmodel import fit, unit_weights
from specmeter.analysis.costmodel_collectives import COLLECTIVE
from specmeter.analysis.costmodel_curve import DRAWS, LEVEL, Row, best, curve
from specmeter.analysis.costmodel_data import Sample
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.analysis.costmodel_trees import Tree
from specmeter.analysis.stats import Interval
from specmeter.analysis.student import t_quantile

COUNT = 3
# Below this (0.2 %) an action is not worth a line.
LEAST = 1.002
# How many of the failures the line on acceptance takes away: a sensitivity, not a prediction.
BETTER = 0.1
SETTING, CEILING, MEASURED = "setting", "ceiling", "measured"


@dataclass(frozen=True)
class Action:
    """One thing to try. ``gain`` is tok/s over the present (1.05: 5 % more), ``command`` what to type.

    ``kind``: ``setting`` is predicted by the model, ``measured`` was run already, and ``ceiling`` is a cost that a
    change may reduce: its interval runs from nothing to all of it, and the point is the middle.
    """

    title: str
    kind: str
    gain: Interval
    command: str
    why: str


class Commands(Protocol):
    """Writes the command lines that try an action on the server at hand."""

    def setting(self, steps: int, topk: int, width: int) -> str:
        """Measure another setting; steps 0 is no speculation, ``width`` the tokens verified, root included."""
        ...

    def verify(self) -> str:
        """Measure with something that may make a wide verify forward cheaper."""
        ...

    def vocabulary(self) -> str:
        """Get a head with a smaller draft vocabulary, or use one; empty where no flag or command does."""
        ...

    def collectives(self, nccl: bool = True) -> str:
        """Measure with another way to move data between ranks; ``nccl`` says whether NCCL moves any of it now."""
        ...

    def host(self) -> str:
        """Measure with scheduling overlapped; empty where the engine has no such option, and then no action is."""
        ...

    def wiring(self) -> str:
        """Check what the head is fed."""
        ...


def actions(
    evidence: Evidence, rows: Sequence[Row], commands: Commands, trees: Mapping[Tree, Row] | None = None
) -> tuple[Action, ...]:
    """The best ``COUNT`` actions, ``trees`` being those predicted, best first.

    Ranked by the middle between the predicted gain and its lower end, so that a wide guess does not come first. Where
    fewer are predicted to help, step counts follow that are not told apart from the present one; fewer than ``COUNT``
    are left only where nothing else can be tried.
    """
    found = [*_steps(evidence, rows, commands), *_off(evidence, rows, commands), *_trees(evidence, commands)]
    found += _predicted_tree(evidence, trees or {}, commands)
    found += [*_verify(evidence, commands), *_draft(evidence, commands), *_host(evidence, commands)]
    found += [*_acceptance(evidence, commands), *_collectives(evidence, commands)]
    useful = sorted((a for a in found if a.gain.point > LEAST and a.command), key=lambda a: -_cautious(a.gain))
    return tuple([*useful, *_not_told_apart(evidence, rows, commands, useful)][:COUNT])


def counted_steps(steps: int) -> str:
    """``1 draft step``, ``3 draft steps``."""
    return f"{steps} draft step{'' if steps == 1 else 's'}"


def _cautious(gain: Interval) -> float:
    return (gain.point + max(0.0, gain.low)) / 2


def _steps(evidence: Evidence, rows: Sequence[Row], commands: Commands) -> list[Action]:
    """The best step count, unless it runs already or loses to plain decoding."""
    top = best(rows)
    if top.steps == evidence.now or (top.speedup is not None and top.speedup.point < 1):
        return []
    return [_step_count(evidence, rows, top, commands)]


def _not_told_apart(
    evidence: Evidence, rows: Sequence[Row], commands: Commands, useful: Sequence[Action]
) -> list[Action]:
    """Further step counts that may be faster within the error; none where plain decoding wins."""
    top = best(rows)
    if top.speedup is not None and top.speedup.point < 1:
        return []
    # With one prompt no error is known, and everything would be within it.
    others = [row for row in rows if row.steps not in (evidence.now, top.steps) and 1 < row.gain.high < math.inf]
    found = [_step_count(evidence, rows, row, commands) for row in sorted(others, key=lambda row: -row.gain.point)]
    titles = {action.title for action in useful}
    return [action for action in found if action.command and action.title not in titles]


def _step_count(evidence: Evidence, rows: Sequence[Row], top: Row, commands: Commands) -> Action:
    now = next(row for row in rows if row.steps == evidence.now)
    why = (
        f"{top.tokens.point:.2f} tokens in {top.cycle_ms.point:.2f} ms instead of "
        f"{now.tokens.point:.2f} in {now.cycle_ms.point:.2f} ms ({top.status})"
    )
    title = f"{counted_steps(top.steps)} instead of {evidence.now}"
    return Action(title, MEASURED if top.status == "measured" else SETTING, top.gain,
                  commands.setting(top.steps, 1, top.steps + 1), why)  # fmt: skip


def _off(evidence: Evidence, rows: Sequence[Row], commands: Commands) -> list[Action]:
    now = next(row for row in rows if row.steps == evidence.now)
    if now.speedup is None or now.speedup.point >= 1:
        return []
    s = now.speedup
    gain = Interval(1 / s.high, 1 / s.point, 1 / s.low if s.low > 0 else math.inf, s.level, s.method, s.n, s.unit)
    if not math.isfinite(s.low):
        gain = Interval(-math.inf, 1 / s.point, math.inf, s.level, s.method, s.n, s.unit)
    assert now.break_even is not None
    why = f"a cycle costs {now.break_even.point:.2f} baseline steps and yields {now.tokens.point:.2f} tokens"
    return [Action("speculation off", SETTING, gain, commands.setting(0, 1, 1), why)]


def _trees(evidence: Evidence, commands: Commands) -> list[Action]:
    """Trees that were measured."""
    found = []
    present = next((s for s in evidence.chains if s.steps == evidence.now and s.accepts), None)
    for tree in (s for s in evidence.samples if s.topk > 1 and s.accepts):
        if present is None:
            continue
        width = round(tree.width)
        why = f"{_length(tree):.2f} tokens in {float(tree.cycle_ms.sum()) / tree.cycles:.2f} ms, measured in this run"
        title = f"a tree: {tree.steps} steps, top-k {tree.topk}, {width} tokens"
        found.append(
            Action(title, MEASURED, _rates(tree, present), commands.setting(tree.steps, tree.topk, width), why)
        )
    return found


def _predicted_tree(evidence: Evidence, trees: Mapping[Tree, Row], commands: Commands) -> list[Action]:
    """The best tree that was not measured, from the draft's ranks."""
    seen = {(s.steps, s.topk, round(s.width)) for s in evidence.samples}
    new = [(tree, row) for tree, row in trees.items() if (tree.steps, tree.topk, tree.tokens) not in seen]
    if not new:
        return []
    tree, row = new[0]
    title = f"a tree: {tree.steps} steps, top-k {tree.topk}, {tree.tokens} tokens"
    why = f"{row.tokens.point:.2f} tokens in {row.cycle_ms.point:.2f} ms, from the draft's ranks where chains failed"
    return [Action(title, SETTING, row.gain, commands.setting(tree.steps, tree.topk, tree.tokens), why)]


def _length(sample: Sample, weights: Mapping[str, float] | None = None) -> float:
    kept = unit_weights(sample, weights) @ sample.kept
    return float(1 + kept[1:].sum() / kept[0])


def _rates(a: Sample, b: Sample) -> Interval:
    """Tokens a millisecond of one measured setting over another's, prompts drawn with replacement."""

    def rate(sample: Sample, weights: Mapping[str, float] | None) -> float:
        w = unit_weights(sample, weights)
        return _length(sample, weights) * float(w @ sample.count) / float(w @ sample.cycle_ms)

    units = sorted(set(a.units) & set(b.units))
    point, n = rate(a, None) / rate(b, None), len(units)
    if n < 2:
        return Interval(-math.inf, point, math.inf, LEVEL, "bootstrap over prompts", n, "prompt")
    rng = np.random.default_rng(0)
    logs = []
    for _ in range(DRAWS):
        weights = dict(zip(units, rng.multinomial(n, [1 / n] * n).tolist(), strict=True))
        logs.append(math.log(rate(a, weights) / rate(b, weights)))
    half = float(np.std(logs, ddof=1)) * math.sqrt(n / (n - 1)) * t_quantile(0.5 + LEVEL / 2, n - 1)
    return Interval(
        point * math.exp(-half), point, point * math.exp(half), LEVEL, "bootstrap over prompts", n, "prompt"
    )


def _verify(evidence: Evidence, commands: Commands) -> list[Action]:
    """A wide verify forward as cheap as one of a single token."""
    model = fit(evidence.samples, evidence.experts)
    parts = model.verify_parts(evidence.now)
    whole = parts["once"] + parts["width"]
    if whole <= 0 or not any(s.steps == 0 for s in evidence.samples):
        return []
    why = (
        f"a verify forward of {evidence.now + 1} tokens takes {whole:.2f} ms, {parts['width']:.2f} ms more than one of "
        "one token; another attention backend, graphs for this width or other threads may take some of that back"
    )
    return [_ceiling(evidence, "a wide verify as cheap as a plain step", {"verify": parts["once"] / whole},
                     commands.verify(), why)]  # fmt: skip


def _draft(evidence: Evidence, commands: Commands) -> list[Action]:
    now = fit(evidence.samples, evidence.experts)
    cost = now.cycle(evidence.now, 1.0)
    heads = [n for n in cost.points if n in ("draft.head", "extend.head")]
    if not heads:
        return []
    ms = sum(cost.points[n] for n in heads)
    why = f"the draft's lm_head takes {ms:.2f} ms a cycle, in proportion to its vocabulary"
    return [_ceiling(evidence, "a smaller draft vocabulary", dict.fromkeys(heads, 0.0), commands.vocabulary(), why)]


def _host(evidence: Evidence, commands: Commands) -> list[Action]:
    cost = fit(evidence.samples, evidence.experts).cycle(evidence.now, 1.0)
    names = [n for n in ("schedule", "wait", "other") if cost.phases.get(n, 0.0) > 0]
    ms = sum(cost.phases[n] for n in names)
    why = f"scheduling, waiting and frames between phases take {ms:.2f} ms a cycle on the host"
    return [_ceiling(evidence, "host work beside the cycle", dict.fromkeys(names, 0.0), commands.host(), why)]


def _collectives(evidence: Evidence, commands: Commands) -> list[Action]:
    """What all collectives of a cycle cost, whichever phase issues them."""
    points = fit(evidence.samples, evidence.experts).cycle(evidence.now, 1.0).points
    names = [n for n in points if COLLECTIVE.search(n)]
    if not names:
        return _on_device(evidence, commands)
    shares = ", ".join(f"{n} {points[n]:.2f}" for n in sorted(names, key=lambda n: -points[n])[:3])
    why = (
        f"collectives take {sum(points[n] for n in names):.2f} ms a cycle, waiting for the slowest rank included "
        f"({shares}); settings of NCCL help only where NCCL serves these messages"
    )
    factors = dict.fromkeys(names, 0.0)
    return [_ceiling(evidence, "cheaper collectives", factors, commands.collectives(), why)]


def _on_device(evidence: Evidence, commands: Commands) -> list[Action]:
    """What a deep window saw of collectives. Waiting for a rank is that rank's work, and no setting of them ends it."""
    seen = evidence.communication
    if seen is None:
        return []
    shares = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(seen.transfer_ms.items(), key=lambda row: -row[1]))
    why = (
        f"collectives keep the device for {sum(seen.transfer_ms.values()):.2f} ms a cycle ({shares}) and wait another "
        f"{seen.waiting_ms:.2f} for the last rank, which no setting changes; {seen.served}"
    )
    assumed = Assumed(saved_ms=dict(seen.transfer_ms))
    return [_ceiling(evidence, "cheaper collectives", assumed, commands.collectives(seen.nccl), why)]


def _acceptance(evidence: Evidence, commands: Commands) -> list[Action]:
    """A tenth of the failures at every position gone: how much a better fed or better trained head is worth."""
    rates = recorded_acceptance(evidence)
    better = tuple(float(c + (1 - c) * BETTER) for c in rates)
    missed = ", ".join(f"{100 * c:.0f}" for c in rates[:4])
    why = (
        f"the draft is kept in {missed} % at positions 1, 2, ...; a wrongly fed head loses there. All of it is what "
        f"{100 * BETTER:.0f} % fewer failures at every position would bring; nobody knows yet what can be won"
    )
    return [_ceiling(evidence, "acceptance: check what the head is fed", Assumed(acceptance=better),
                     commands.wiring(), why)]  # fmt: skip


def _ceiling(evidence: Evidence, title: str, change: Mapping[str, float] | Assumed, command: str, why: str) -> Action:
    assumed = change if isinstance(change, Assumed) else Assumed(change)
    row = next(r for r in curve(evidence, [evidence.now], assumed) if r.steps == evidence.now)
    most = max(1.0, row.gain.point)
    method = "between nothing and all of it; the point is the middle"
    gain = Interval(1.0, (1 + most) / 2, most, 1.0, method, row.gain.n, row.gain.unit)
    return Action(title, CEILING, gain, command, why)
