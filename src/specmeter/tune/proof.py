"""The proof of a tune: baseline, tuned and starting point in starts of their own; one that fails keeps the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specmeter.analysis.compare import ACROSS, ArmFacts, analyse_compare
from specmeter.bench.comparing import ComparePlan, Gathered, document_of, run_starts
from specmeter.bench.progress import Progress
from specmeter.bench.session import Probing
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.rundir import RunWriter
from specmeter.tune.journal import Journal
from specmeter.tune.space import Candidate

if TYPE_CHECKING:
    from specmeter.tune.tuning import TunePlan

BASELINE, TUNED, START = "baseline", "tuned", "starting point"
Arms = Mapping[str, Candidate]


def prove(
    plan: TunePlan,
    level: int,
    arms: Arms,
    how: Probing,
    journal: Journal,
    writer: RunWriter,
    progress: Progress,
    refused: str = "",
) -> dict[str, Any]:
    """Starts of their own for every arm; kept in the journal, so that a finished proof is not run again.

    ``refused`` is why no start may be made; empty: none forbids it. Where a start fails the proof ends there: ``proof``
    tells of the starts before it, ``missing`` of what is not there, and nothing goes into the journal, so that a later
    session proves it.
    """
    keys = {name: candidate.key for name, candidate in arms.items()}
    design = [plan.confirm_starts, plan.confirm_blocks, plan.threshold]
    for event in journal.events("proof"):
        if event["level"] == level and event["arms"] == keys and event.get("design") == design:
            return dict(event["found"])
    if refused:
        return {"proof": None, "against_start": None, "missing": refused}
    compared = ComparePlan(
        tuple(candidate.arm(plan.spec, name) for name, candidate in arms.items()),
        plan.prompts,
        plan.confirm_blocks,
        plan.sending,
        plan.confirm_starts,
        plan.threshold,
        concurrency=level,
    )
    progress.say(f"proof: {', '.join(f'{name} ({c.label})' for name, c in arms.items())}")
    began, gathered = time.monotonic(), Gathered()
    child = writer.child(f"proof-{level}")
    missing = ""
    try:
        run_starts(compared, how, child, progress, gathered)
    except SpecmeterError as error:
        if error.exit not in (Exit.SERVER_FAILED, Exit.USAGE):
            raise
        missing = _missing(error, gathered, compared)
        progress.say(f"  {missing}")
    if not gathered.requests:
        return {"proof": None, "against_start": None, "missing": missing, "proof_s": time.monotonic() - began}
    document = document_of(compared, gathered)
    with child.postponing():
        child.write_analysis(document)
        child.finish("partial" if missing else "complete")
    against = None
    if START in arms:
        facts = [ArmFacts(START), ArmFacts(TUNED)]
        against = analyse_compare(facts, gathered.requests, plan.threshold)["pairs"][0]
    found = {"proof": document, "against_start": against, "proof_s": time.monotonic() - began}
    if missing:
        return {**found, "missing": missing}
    journal.add("proof", {"level": level, "arms": keys, "design": design, "found": found})
    return found


def _missing(error: SpecmeterError, gathered: Gathered, compared: ComparePlan) -> str:
    """What the proof lacks, and why."""
    order = compared.order()
    done = len({request.start for request in gathered.requests})
    name = order[done][0].name if done < len(order) else "the last"
    lines = [line.strip() for line in error.why.splitlines() if line.strip()]
    why = " ".join([error.what, *lines[:1]])[:300]
    return f"the proof ended at start {done + 1} of {len(order)} ({name}): {why}"


def proven(winner: Candidate, arms: Arms, found: Mapping[str, Any]) -> Candidate:
    """What is to be run after the proof: the files must not start what the proof has shown to be slower.

    A proof that a failed start has ended without a ratio overrules nothing.
    """
    if kept(found) == START:
        return arms[START]
    if found["proof"] is None or (found.get("missing") and _tuned(found["proof"])["ratio"] is None):
        return winner
    return arms[BASELINE] if off(winner, found["proof"]) else arms[TUNED]


def kept(found: Mapping[str, Any]) -> str:
    """The starting point's name where the tuned setting is shown to be slower than it, and it gains; else empty."""
    against = found["against_start"]
    if against is None or against["verdict"] != "slower":
        return ""
    row = next(row for row in found["proof"]["pairs"] if row["arm"] == START)
    return START if row["ratio"] is not None and row["ratio"]["point"] > 1 else ""


def _tuned(proof: Mapping[str, Any]) -> Mapping[str, Any]:
    row: Mapping[str, Any] = next(row for row in proof["pairs"] if row["arm"] == TUNED)
    return row


def off(winner: Candidate, proof: Mapping[str, Any]) -> bool:
    """Whether the baseline is to be run: speculation is slower, or neither search nor proof shows a gain."""
    row = _tuned(proof)
    if row["verdict"] in ("faster", "slower"):
        return bool(row["verdict"] == "slower")
    if not winner.setting.steps or row["verdict"] == ACROSS:  # too few starts outweigh no search
        return not winner.setting.steps
    return row["ratio"] is None or bool(row["ratio"]["point"] <= 1)


def verdict(
    winner: Candidate,
    rival: Candidate | None,
    proof: Mapping[str, Any] | None,
    keep: Candidate | None = None,
    missing: str = "",
    speculates: bool = True,
) -> dict[str, str]:
    """The sentence at the top: the winner, that speculation should be off, or that ``keep``, the start, should stay.

    ``speculates``: a speculative setting was in the space.
    """
    if proof is None or rival is None or (missing and _tuned(proof)["ratio"] is None):
        plain = speculates and not winner.setting.steps
        best = "Speculation should be off, as far as the search can tell" if plain else winner.label
        why = f": {missing}" if missing else " in starts of its own"
        return {"word": "inconclusive", "sentence": f"{best}: fastest in the search, not proven{why}."}
    row = _tuned(proof)
    word = row["verdict"]
    gain = f"{100 * (row['ratio']['point'] - 1):+.1f} %" if row["ratio"] else "not known"
    if keep is not None:
        text = f"Keep {keep.label}, the starting point: the best of the search, {rival.label}, is shown to be slower."
        return {"word": next(row for row in proof["pairs"] if row["arm"] == START)["verdict"], "sentence": text}
    if word == "faster":
        return {"word": word, "sentence": f"{rival.label} is best: {gain} against the baseline."}
    if word == "slower":
        text = f"Speculation should be off: its best setting, {rival.label}, is {gain} against the baseline."
        return {"word": word, "sentence": text}
    if word == ACROSS:
        best = winner.label if winner.setting.steps else "no speculation"
        few = row["reason"].replace("at least ", "").removesuffix(" a side")
        sentence = f"Not proven ({few}): {best} is fastest in the search, {rival.label} is {gain} in the proof."
        return {"word": word, "sentence": sentence}
    if row["ratio"] is None:
        why = f"no ratio in the proof ({row.get('reason') or 'a side gave no rate'})"
        sentence = f"Speculation should be off until it is shown to gain: {rival.label} has {why}."
        return {"word": word, "sentence": sentence}
    if off(winner, proof):
        sentence = f"Speculation should be off: {rival.label}, its best setting, is not shown to gain ({gain})."
        return {"word": word, "sentence": sentence}
    return {"word": word, "sentence": f"{rival.label} is best, {gain} against the baseline, but {word}."}
