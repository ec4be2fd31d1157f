"""What ``specmeter tune`` does: search at each concurrency level, then prove the winner in starts of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specmeter import __version__
from specmeter.analysis.profile import SCHEMA
from specmeter.bench.comparing import warnings_of
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Probing
from specmeter.engines import ServerSpec, Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.rundir import RunWriter
from specmeter.tune.budget import Budget
from specmeter.tune.facts import journal_facts
from specmeter.tune.flags import EngineFlags
from specmeter.tune.journal import Journal
from specmeter.tune.own import needs_speculation, starting_point, stated
from specmeter.tune.planner import Planner, Predict, need_optuna
from specmeter.tune.proof import BASELINE, START, TUNED, kept, prove, proven, verdict
from specmeter.tune.search import Search
from specmeter.tune.space import Candidate, Space
from specmeter.tune.trial import Runner


@dataclass(frozen=True)
class TunePlan:
    """The server, its space, the load, the budget and the proof.

    ``blocks`` passes over the prompts a trial and ``confirm_blocks`` a proving start, the first of each dropped;
    ``levels`` are the numbers of requests at once, searched one after the other. ``where``: the far host, empty here;
    ``separate``: nothing is switched inside one start; ``exported``: the variables that the server inherits;
    ``served_model``: the name that requests carry, None for the server's first.
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
    served_model: str | None = None

    def starting_point(self) -> Candidate:
        """The setting that the user's command has, with no knob touched (tune.own)."""
        return starting_point(self.spec, self.flags)

    def facts(self) -> dict[str, str]:
        """What a journal's trials belong to; another value of any makes them incomparable."""
        return journal_facts(self)

    def check(self) -> None:
        """Raise SpecmeterError for what would end the tune after its first starts: before anything starts."""
        need_optuna(self.space)
        if any(setting.steps for setting in self.space.settings):
            needs_speculation(self.spec)
        self.starting_point()
        self.facts()


def tune(
    plan: TunePlan, runner: Runner, how: Probing, journal: Journal, writer: RunWriter, progress: Progress
) -> dict[str, Any]:
    """Search and proof at every level; returns the document of analysis.json, kind ``tune``.

    Raises SpecmeterError (exit 4) if no point is feasible at the first level; one that fails later is named in
    ``missing``. An interrupt loses the running trial, or the running proof.
    """
    levels: list[dict[str, Any]] = []
    missing: list[str] = []
    spent_s = 0.0
    for place, level in enumerate(plan.levels):
        budget = plan.budget.left(spent_s, len(plan.levels) - place)
        began = time.monotonic()
        try:
            found, seconds = _level(plan, level, budget, runner, how, journal, writer, progress)
        except SpecmeterError as error:
            if not levels or error.exit is not Exit.SERVER_FAILED:
                raise
            why = f"{error.what} {error.why}".strip()
            missing.append(f"{level} requests at once: {why}")
            levels[-1]["search"]["not_run"].append({"label": f"{level} requests at once", "reason": why})
            spent_s += time.monotonic() - began
            continue
        levels.append(found)
        if found.get("missing"):
            missing.append(f"{level} requests at once: {found['missing']}")
            found["search"]["not_run"].append({"label": "the proof as a whole", "reason": found["missing"]})
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
        "missing": missing,
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
        "starting_point": _named(start, search, plan),
        "search": _search_json(search, planner),
        "proof": None,
        "against_start": None,
    }
    rival = winner if winner.setting.steps else search.best(speculative=True)
    speculates = any(setting.steps for setting in plan.space.settings)
    if not speculates and winner != start.plain:
        baseline, rival = start.plain, winner
    chosen = winner
    if baseline is not None and rival is not None and plan.confirm_starts:
        arms = _arms(baseline, rival, start, search)
        minutes = budget.minutes or math.inf
        over = f"none was begun, since the {minutes:.3g} minutes were over" if search.spent_s() >= 60 * minutes else ""
        found |= prove(plan, level, arms, how, journal, writer, progress, over)
        chosen = proven(winner, arms, found)
    found["winner"] = _candidate_json(chosen, plan.spec)
    found["chosen_by"] = "search" if chosen == winner else "proof"
    keep = start if kept(found) == START else None
    found["verdict"] = verdict(winner, rival, found["proof"], keep, found.get("missing", ""), speculates)
    proof_s = float(found.get("proof_s", 0.0))
    earlier_s = proof_s if proof_s > search.session_s() else 0.0  # a proof of an earlier session, from the journal
    return found, search.spent_s() + earlier_s


def _named(start: Candidate, search: Search, plan: TunePlan) -> str:
    """The starting point's label, and where its setting is from if the command does not say it."""
    if start.own:
        said = next((o.told for o in search.observations if o.candidate.own and o.told), "")
        return f"{start.label}: {said}" if said else f"{start.label}, whose setting its server does not tell"
    if plan.flags.own_choice is not None and stated(plan.spec) is None:
        return f"{start.label}, this release's own choice"
    return start.label


def _arms(baseline: Candidate, rival: Candidate, start: Candidate, search: Search) -> dict[str, Candidate]:
    """Baseline, the best speculative point and, if it is neither and runs, the starting point."""
    arms = {BASELINE: baseline, TUNED: rival}
    feasible = {o.candidate.key for o in search.observations if o.mean is not None}
    if start.key not in (baseline.key, rival.key) and start.key in feasible:
        arms[START] = start
    return arms


def _candidate_json(candidate: Candidate, spec: ServerSpec) -> dict[str, Any]:
    facts = candidate.arm(spec).facts()
    return {
        "label": candidate.label,
        "settings": candidate.setting_json(),
        **({"own": True} if candidate.own else {}),
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


def warnings_of_tune(document: Mapping[str, Any]) -> list[str]:
    """What is missing, and what the reader of each proof has to know: a knob that its server does not run with."""
    proofs = [(level["concurrency"], level["proof"]) for level in document["levels"] if level["proof"]]
    said = [f"the proof at {at}: {words}" for at, proof in proofs for words in warnings_of(proof)]
    return [*document["missing"], *said]


def candidates_by_level(levels: Sequence[Mapping[str, Any]]) -> dict[int, Candidate]:
    """The winner of each concurrency level."""
    return {int(level["concurrency"]): _from_json(level["winner"]) for level in levels}


def _from_json(winner: Mapping[str, Any]) -> Candidate:
    settings = winner["settings"]
    return Candidate(
        Setting(settings["steps"], settings["topk"], settings["draft_tokens"]),
        tuple(sorted(winner["flags"].items())),
        tuple(sorted(winner["knobs"].items())),
        winner.get("own", False),
    )
