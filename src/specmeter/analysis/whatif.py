"""What-ifs in the user's words, as ``verify 27 % faster``, ``seams at zero``, ``draft at TP 1``, ``k=2``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmeter.analysis.costmodel_collectives import COLLECTIVE
from specmeter.analysis.costmodel_curve import Row, best, curve
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.analysis.costmodel_seams import Seams
from specmeter.analysis.costmodel_trees import TREE_ASSUMPTIONS, Tree, tree_rows
from specmeter.errors import SpecmeterError

_NAME = r"(?P<name>[a-z_]+(?:\.[a-z_]+)?)"
_FASTER = re.compile(rf"^{_NAME} (?P<percent>\d+(?:\.\d+)?) ?% (?P<way>faster|slower)$")
_ZERO = re.compile(rf"^{_NAME} at zero$")
_AT_MS = re.compile(rf"^{_NAME} at (?P<ms>\d+(?:\.\d+)?) ?ms$")
_STEPS = re.compile(r"^(?:k ?= ?|steps )(?P<steps>\d+)$|^(?P<other>\d+) steps$")
_LENGTH = re.compile(r"^accept length (?P<tokens>\d+(?:\.\d+)?)$")
_BATCH = re.compile(r"^batch (?P<batch>[1-9]\d{0,4})$")
_WIRING = re.compile(r"^wiring fixed(?:: ?(?P<rates>[\d., ]+))?$")
_TREE = re.compile(r"^tree (?P<steps>\d{1,3})/(?P<topk>\d{1,3})/(?P<tokens>\d{1,4})$")
_DRAFT_TP = re.compile(r"^draft at tp ?1$")
EXAMPLES = (
    "verify 27 % faster", "draft.head at zero", "verify at 12 ms", "seams at zero", "draft at TP 1", "wiring fixed",
    "wiring fixed: 0.8,0.7,0.6", "accept length 2.5", "k=2", "tree 3/4/8", "batch 8",
)  # fmt: skip
_MOST_FACTOR = 1e6
SAME_BASELINE = "the baseline step stays as it was measured"


@dataclass(frozen=True)
class Answer:
    """What a what-if gives: ``here`` at the present steps, ``best`` at the best steps then; ``assumptions`` in words.

    Both rows are None with a ``reason`` where the recording does not hold what is asked.
    """

    question: str
    here: Row | None
    best: Row | None
    assumptions: tuple[str, ...]
    reason: str = ""


def ask(evidence: Evidence, question: str, steps: Sequence[int], phases_ms: Mapping[str, float]) -> Answer:
    """The answer to one question; ``phases_ms`` are the present milliseconds of phases and points.

    Raises SpecmeterError for words that are not understood or name no phase.
    """
    words = re.sub(r"\s+", " ", question.strip().lower().replace("percent", "%"))
    steps_asked = _STEPS.match(words)
    if steps_asked:
        # So long a number is no step count, and Python refuses to read one of thousands of digits.
        wanted = int((steps_asked["steps"] or steps_asked["other"])[:9])
        evidence.check_steps(wanted, question)
        return _steps(evidence, question, wanted)
    tree = _TREE.match(words)
    if tree:
        return _tree(evidence, question, Tree(int(tree["steps"]), int(tree["topk"]), int(tree["tokens"])))
    if words in ("seams at zero", "seam at zero"):
        assumed, assumptions, reason = _seams(evidence.seams, phases_ms)
    elif _DRAFT_TP.match(words):
        seen = evidence.communication
        assumed, assumptions, reason = _draft_tp(phases_ms, seen.draft_ms if seen is not None else {})
    else:
        measured = sorted({s.batch for s in evidence.chains})
        assumed, assumptions, reason = _assumed(words, question, phases_ms, measured)
    if assumed is None:
        return Answer(question, None, None, assumptions, reason)
    rows = curve(evidence, steps, assumed)
    here = next(row for row in rows if row.steps == evidence.now)
    return Answer(question, here, best(rows), assumptions)


def _steps(evidence: Evidence, question: str, wanted: int) -> Answer:
    if wanted < 1:
        return Answer(question, None, None, (), "0 steps is the baseline: see the baseline step")
    rows = curve(evidence, [wanted])
    row = next(r for r in rows if r.steps == wanted)
    return Answer(question, row, row, ("the same prompts, batch and machine",))


def _tree(evidence: Evidence, question: str, tree: Tree) -> Answer:
    """A tree as SGLang's flags name it: steps/top-k/draft tokens."""
    if tree.topk < 2 or not 2 <= tree.tokens <= tree.largest:
        raise SpecmeterError(
            f"{question}: such a tree cannot be grown.",
            f"It has 2 branches a step or more, and {tree.label} grows {tree.largest} tokens at most.",
            "Write steps/top-k/draft tokens, as `tree 3/4/8`.",
        )
    try:
        row = tree_rows(evidence, [tree])[0]
    except SpecmeterError as error:
        return Answer(question, None, None, (), f"{error.what} {error.why}".strip())
    return Answer(question, row, row, TREE_ASSUMPTIONS)


def _assumed(
    words: str, question: str, phases_ms: Mapping[str, float], measured: Sequence[float]
) -> tuple[Assumed | None, tuple[str, ...], str]:
    for pattern in (_FASTER, _ZERO, _AT_MS):
        match = pattern.match(words)
        if match:
            return _faster(match.groupdict(), question, phases_ms)
    length = _LENGTH.match(words)
    if length:
        assumption = "every position's acceptance is raised or lowered to one power; the cycle changes with tokens only"
        return Assumed(length=float(length["tokens"])), (assumption,), ""
    batch = _BATCH.match(words)
    if batch:
        return _batch(int(batch["batch"]), measured)
    wiring = _WIRING.match(words)
    if wiring:
        return _wiring(wiring["rates"], question)
    raise SpecmeterError(
        f"Not understood: {question}", f"What-ifs read like: {'; '.join(EXAMPLES)}.", "PHASE is draft, verify, ..."
    )


def _faster(
    match: dict[str, str | Any], question: str, phases_ms: Mapping[str, float]
) -> tuple[Assumed | None, tuple[str, ...], str]:
    name = str(match["name"])
    present = phases_ms.get(name)
    if present is None:
        raise SpecmeterError(
            f"{question}: this run has no {name}.", f"It has {', '.join(sorted(phases_ms))}.", "Name one of them."
        )
    if "percent" in match:
        share = float(match["percent"]) / 100
        if match["way"] == "faster" and share > 1:
            raise SpecmeterError(f"{question}: nothing is more than 100 % faster in time.")
        factor = 1 - share if match["way"] == "faster" else 1 + share
        note = f"{name} takes {100 * factor:g} % of its time at every step count"
    elif "ms" in match:
        factor = float(match["ms"]) / present if present else 1.0
        note = f"{name} changes from {present:.3f} to {float(match['ms']):g} ms, and by that factor at every step count"
    else:
        factor, note = 0.0, f"all {present:.3f} ms of {name} vanish, and nothing else takes longer for it"
    if factor > _MOST_FACTOR:
        raise SpecmeterError(
            f"{question}: that is more than {_MOST_FACTOR:g} times as long.", next_step="Ask for a change within reach."
        )
    notes = [note, "the acceptance stays"]
    if name.startswith("verify"):
        notes.append(f"{SAME_BASELINE}, though a plain step is such a forward too and may gain as well")
    else:
        notes.append(SAME_BASELINE)
    return Assumed({name: factor}), tuple(notes), ""


def _batch(batch: int, measured: Sequence[float]) -> tuple[Assumed, tuple[str, ...], str]:
    shown = ", ".join(f"{b:g}" for b in measured)
    notes = [
        f"recorded at batch {shown}; a verify forward of {batch} sequences costs what as many tokens of one would",
        "tok/s is a sequence's; acceptance does not depend on the batch; break-even only where plain decoding was "
        "recorded at this batch",
    ]
    if len(measured) == 1:
        notes.append(
            "one batch was recorded, so a draft step is taken to cost the same, as while it is bound by memory"
        )
    return Assumed(batch=float(batch)), tuple(notes), ""


def _seams(seams: Seams | None, phases_ms: Mapping[str, float]) -> tuple[Assumed | None, tuple[str, ...], str]:
    if seams is not None:
        vanish = f"{seams.ms:.3f} ms of a cycle vanish, as many at every step count: {seams.words}"
        kept = "the device never waits for the host, and its own work stays"
        return Assumed(saved_ms={"seam": seams.ms}), (vanish, kept, SAME_BASELINE), ""
    rest = sum(max(0.0, phases_ms.get(name, 0.0)) for name in ("other", "wait"))
    reason = (
        "a seam is the device's idle time between two phases, and this run has a host clock only (on a GPU profile "
        f"--deep N or --device-events shows it); host time in no named phase is {rest:.3f} ms a cycle, which is no "
        "seam (ask `other at zero` for that)"
    )
    return None, (), reason


def _draft_tp(
    phases_ms: Mapping[str, float], window_ms: Mapping[str, float]
) -> tuple[Assumed | None, tuple[str, ...], str]:
    """By points on the draft's collectives, else by what a deep window saw of them on the device."""
    found = [name for name in phases_ms if name.startswith(("draft.", "extend.")) and COLLECTIVE.search(name)]
    whole = (
        "a whole draft layer on one rank takes as long as its shard did (its weights are read by one device instead)"
    )
    if found:
        total = sum(phases_ms[name] for name in found)
        vanish = f"{', '.join(sorted(found))} vanish: {total:.3f} ms a cycle, waiting for the slowest rank included"
        return Assumed(dict.fromkeys(found, 0.0)), (vanish, whole, SAME_BASELINE), ""
    if sum(window_ms.values()) > 0:
        parts = ", ".join(f"{phase} {ms:.3f}" for phase, ms in window_ms.items() if ms > 0)
        vanish = (
            f"what collectives of the draft have alone on the device vanishes ({parts} ms a cycle in the deep window), "
            "waiting for the slowest rank included, and the cycle is as much shorter: it is, where the host keeps ahead"
        )
        return Assumed(saved_ms=dict(window_ms)), (vanish, whole, SAME_BASELINE), ""
    reason = (
        "no collective was recorded in the draft (one process, or neither a recipe with points on them nor a deep "
        "window: profile --deep N); with a known figure ask for example `draft 20 % faster`"
    )
    return None, (), reason


def _wiring(rates: str | None, question: str) -> tuple[Assumed | None, tuple[str, ...], str]:
    if rates is None:
        reason = (
            "what the head accepts when fed rightly is not in this run: `specmeter check --probe` measures it; then "
            "ask `wiring fixed: 0.8,0.7,0.6` with its acceptance by position, or `accept length 2.5`"
        )
        return None, (), reason
    try:
        values = tuple(float(part) for part in rates.replace(" ", "").strip(",").split(",") if part)
    except ValueError:
        values = ()
    if not values or not all(0 <= v <= 1 for v in values):
        raise SpecmeterError(
            f"{question}: acceptance by position is a list of shares from 0 to 1.",
            next_step="Write it as `wiring fixed: 0.8,0.7,0.6`.",
        )
    shown = ", ".join(f"{v:g}" for v in values)
    notes = (
        f"the share kept at each position, if the one before was, is {shown}",
        "the cycle's phases stay as they are",
    )
    return Assumed(acceptance=values), notes, ""
