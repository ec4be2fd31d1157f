"""What ``specmeter tune`` does: search at each concurrency level, then prove the winner in starts of its own."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specmeter import __version__
from specmeter.analysis.compare import ACROSS, ArmFacts, analyse_compare
from specmeter.analysis.profile import SCHEMA
from specmeter.bench.comparing import ComparePlan, Gathered, document_of, run_starts
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Probing
from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.engines.flags import flag_value
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.rundir import RunWriter
from specmeter.tune.flags import EngineFlags, program_of
from specmeter.tune.journal import Journal
from specmeter.tune.planner import Planner, Predict
from specmeter.tune.search import Budget, Search
from specmeter.tune.space import Candidate, Space
from specmeter.tune.trial import Runner

BASELINE, TUNED, START = "baseline", "tuned", "starting point"


@dataclass(frozen=True)
class TunePlan:
    """The server, its space, the load, the budget and the proof.

    ``blocks`` passes over the prompts a trial and ``confirm_blocks`` a proving start, the first of each dropped;
    ``levels`` are the numbers of requests at once, searched one after the other. ``where``: the far host, empty here;
    ``separate``: nothing is switched inside one start; ``exported``: the variables that the server inherits.
    """

    spec: ServerSpec
    space: Space
    flags: EngineFlags
    prompts: tuple[Prompt, ...]
    sending: Sending
    budget: Budget
    levels: tuple[int, ...] = (1,)
    blocks: int = 6
    confirm_starts: int = 3
    confirm_blocks: int = 4
    threshold: float = 0.01
    predict: Predict | None = None
    where: str = ""
    separate: bool = False
    exported: Mapping[str, str] = field(default_factory=dict)

    def starting_point(self) -> Candidate:
        """The setting that the user's command has, with no knob touched; steps left to the engine count as 2."""
        setting = engine_named(self.spec.engine or "").setting_of(self.spec.command)
        return Candidate(setting if setting is not None else Setting.of(2))

    def facts(self) -> dict[str, str]:
        """What a journal's trials belong to; another value of any makes them incomparable."""
        engine = engine_named(self.spec.engine or "")
        # Without speculation and with the same one everywhere: the draft and its method stay in the second.
        words = [mask_command(engine.with_setting(self.spec.command, Setting.of(steps))) for steps in (0, 2)]
        texts = json.dumps([prompt.as_messages() for prompt in self.prompts])
        model = flag_value(self.spec.command, "--model", "--model-path")
        load = [hashlib.sha256(texts.encode()).hexdigest()[:16], self.sending.max_tokens, self.sending.temperature]
        return {
            "engine": self.spec.engine or "",
            "engine version": str(self.flags.version),
            "model": model or " ".join(program_of(self.spec.command)[-1:]),
            "command": json.dumps(words),
            "load": json.dumps([*load, self.sending.seed, self.blocks, self.sending.ignore_eos]),
            "environment": json.dumps(mask_env({**self.exported, **self.spec.env}), sort_keys=True),
            "host": self.where,
            "starts": "one a setting" if self.separate else "as the engine allows",
        }


def tune(
    plan: TunePlan, runner: Runner, how: Probing, journal: Journal, writer: RunWriter, progress: Progress
) -> dict[str, Any]:
    """Search and proof at every level; returns the document of analysis.json, kind ``tune``.

    Raises SpecmeterError (exit 4) if no point is feasible. An interrupt loses the running start only.
    """
    levels: list[dict[str, Any]] = []
    spent_s = 0.0
    for place, level in enumerate(plan.levels):
        budget = plan.budget.left(spent_s, len(plan.levels) - place)
        found, seconds = _level(plan, level, budget, runner, how, journal, writer, progress)
        levels.append(found)
        spent_s += seconds
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "tune",
        "version": __version__,
        "engine": {"name": plan.spec.engine, "version": plan.flags.version},
        "space": plan.space.as_json(),
        "budget": {"minutes": plan.budget.minutes, "trials": plan.budget.trials},
        "threshold": plan.threshold,
        "levels": levels,
        "verdict": levels[0]["verdict"],
    }
    return document


def _level(
    plan: TunePlan,
    level: int,
    budget: Budget,
    runner: Runner,
    how: Probing,
    journal: Journal,
    writer: RunWriter,
    progress: Progress,
) -> tuple[dict[str, Any], float]:
    """One level's part of the document, and the seconds it took, those of earlier sessions included."""
    start = plan.starting_point()
    planner = Planner(plan.space, start, plan.predict, plan.sending.seed)
    search = Search(planner, runner, journal, budget, level, plan.blocks, progress.say)
    search.run(start)
    winner, baseline = search.best(), search.best(speculative=False)
    if winner is None:
        raise SpecmeterError("No point of the space is feasible.", exit=Exit.SERVER_FAILED)
    found: dict[str, Any] = {
        "concurrency": level,
        "starting_point": start.label,
        "search": _search_json(search, planner),
        "proof": None,
        "against_start": None,
    }
    rival = winner if winner.setting.steps else search.best(speculative=True)
    chosen = winner
    if baseline is not None and rival is not None and plan.confirm_starts:
        arms = _arms(baseline, rival, start, search)
        found |= _proof(plan, level, arms, how, journal, writer, progress)
        chosen = _proven(winner, arms, found)
    found["winner"] = _candidate_json(chosen, plan.spec)
    found["chosen_by"] = "search" if chosen == winner else "proof"
    found["verdict"] = _verdict(winner, rival, found["proof"], start if _kept(found) == START else None)
    proof_s = float(found.get("proof_s", 0.0))
    earlier_s = proof_s if proof_s > search.session_s() else 0.0  # a proof of an earlier session, from the journal
    return found, search.spent_s() + earlier_s


def _proven(winner: Candidate, arms: Mapping[str, Candidate], found: Mapping[str, Any]) -> Candidate:
    """What is to be run after the proof: the files must not start what the proof has shown to be slower."""
    if _kept(found) == START:
        return arms[START]
    return arms[BASELINE] if _off(winner, found["proof"]) else arms[TUNED]


def _kept(found: Mapping[str, Any]) -> str:
    """The starting point's name where the tuned setting is shown to be slower than it, and it gains; else empty."""
    against = found["against_start"]
    if against is None or against["verdict"] != "slower":
        return ""
    row = next(row for row in found["proof"]["pairs"] if row["arm"] == START)
    return START if row["ratio"] is not None and row["ratio"]["point"] > 1 else ""


def _off(winner: Candidate, proof: Mapping[str, Any]) -> bool:
    """Whether the baseline is to be run: speculation is slower, or neither search nor proof shows a gain."""
    row = next(row for row in proof["pairs"] if row["arm"] == TUNED)
    if row["verdict"] in ("faster", "slower"):
        return bool(row["verdict"] == "slower")
    if not winner.setting.steps or row["verdict"] == ACROSS:  # too few starts outweigh no search
        return not winner.setting.steps
    return row["ratio"] is None or bool(row["ratio"]["point"] <= 1)


def _arms(baseline: Candidate, rival: Candidate, start: Candidate, search: Search) -> dict[str, Candidate]:
    """Baseline, the best speculative point and, if it is neither and runs, the starting point."""
    arms = {BASELINE: baseline, TUNED: rival}
    feasible = {o.candidate.key for o in search.observations if o.mean is not None}
    if start.key not in (baseline.key, rival.key) and start.key in feasible:
        arms[START] = start
    return arms


def _proof(
    plan: TunePlan,
    level: int,
    arms: Mapping[str, Candidate],
    how: Probing,
    journal: Journal,
    writer: RunWriter,
    progress: Progress,
) -> dict[str, Any]:
    """Starts of their own for every arm; kept in the journal, so that a finished proof is not run again."""
    keys = {name: candidate.key for name, candidate in arms.items()}
    design = [plan.confirm_starts, plan.confirm_blocks, plan.threshold]
    for event in journal.events("proof"):
        if event["level"] == level and event["arms"] == keys and event.get("design") == design:
            return dict(event["found"])
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
    run_starts(compared, how, child, progress, gathered)
    document = document_of(compared, gathered)
    child.write_analysis(document)
    child.finish("complete")
    against = None
    if START in arms:
        facts = [ArmFacts(START), ArmFacts(TUNED)]
        against = analyse_compare(facts, gathered.requests, plan.threshold)["pairs"][0]
    found = {"proof": document, "against_start": against, "proof_s": time.monotonic() - began}
    journal.add("proof", {"level": level, "arms": keys, "design": design, "found": found})
    return found


def _candidate_json(candidate: Candidate, spec: ServerSpec) -> dict[str, Any]:
    facts = candidate.arm(spec).facts()
    return {
        "label": candidate.label,
        "settings": candidate.setting.as_json(),
        "flags": dict(candidate.flags),
        "knobs": dict(candidate.env),
        "command": facts["command"],
        "env": facts["env"],
    }


def _search_json(search: Search, planner: Planner) -> dict[str, Any]:
    logs: dict[str, list[float]] = {}
    infeasible: dict[str, str] = {}
    stopped: set[str] = set()
    for o in search.observations:
        if o.mean is not None:
            logs.setdefault(o.candidate.label, []).append(o.mean)
        if o.cause:
            infeasible.setdefault(o.candidate.label, o.cause)
        if o.stopped:
            stopped.add(o.candidate.label)
    predicted = {setting.label: value for setting, value in planner.predicted.items()}
    rows: list[dict[str, Any]] = [
        {
            "label": label,
            "starts": len(values),
            "tokens_per_s": math.exp(sum(values) / len(values)),
            "predicted_tokens_per_s": predicted.get(label),
            "raced_out": label in stopped,
        }
        for label, values in logs.items()
    ]
    return {
        "starts": search.starts(),
        "server_s": sum(o.seconds for o in search.observations),
        "ended_by": search.stopped_by or "nothing was left to learn",
        "tried": sorted(rows, key=lambda row: -row["tokens_per_s"]),
        "infeasible": [{"label": label, "cause": cause} for label, cause in infeasible.items()],
        "not_run": [{"label": label, "reason": reason} for label, reason in planner.skipped.items()],
    }


def _verdict(
    winner: Candidate, rival: Candidate | None, proof: Mapping[str, Any] | None, kept: Candidate | None = None
) -> dict[str, str]:
    """The sentence at the top: the winner, that speculation should be off, or that ``kept``, the start, should stay."""
    if proof is None or rival is None:
        off = "Speculation should be off, as far as the search can tell" if not winner.setting.steps else winner.label
        sentence = f"{off}: fastest in the search, not proven in starts of its own."
        return {"word": "inconclusive", "sentence": sentence}
    row = next(row for row in proof["pairs"] if row["arm"] == TUNED)
    word = row["verdict"]
    gain = f"{100 * (row['ratio']['point'] - 1):+.1f} %" if row["ratio"] else "not known"
    if kept is not None:
        text = f"Keep {kept.label}, the starting point: the best of the search, {rival.label}, is shown to be slower."
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
    if _off(winner, proof):
        sentence = f"Speculation should be off: {rival.label}, its best setting, is not shown to gain ({gain})."
        return {"word": word, "sentence": sentence}
    return {"word": word, "sentence": f"{rival.label} is best, {gain} against the baseline, but {word}."}


def best_by_level(levels: Sequence[Mapping[str, Any]]) -> dict[int, Setting]:
    """The winning speculative setting of each concurrency level."""
    found = {}
    for level in levels:
        settings = level["winner"]["settings"]
        found[int(level["concurrency"])] = Setting(settings["steps"], settings["topk"], settings["draft_tokens"])
    return found
