"""``specmeter tune``'s own search on a server of the fleet, and what the cost model says before it.

The search is Search, Planner, Journal and the race of ``specmeter tune``; only its runner is another one: the server is
already there, side by side with those of the proof, and SGLang's adaptive runtime switches its steps. The model's
predictions are kept beside what was found and do not guide the search: it measures every setting, so that each
prediction is held against a measurement.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_windows as windows
from gpu_client import Answer, Load, Prompt, drive
from gpu_fleet import Server
from gpu_switching import check, meet, switch

import specmeter
from specmeter import control
from specmeter.analysis.compare import DROPPED_BLOCKS, ArmFacts, analyse_compare
from specmeter.analysis.costmodel_curve import curve
from specmeter.analysis.costmodel_document import row_json
from specmeter.analysis.costmodel_explain import evidence_of
from specmeter.analysis.stats import ratio_interval
from specmeter.engines import Setting
from specmeter.trace import Request
from specmeter.tune.journal import Journal
from specmeter.tune.planner import HOPELESS, Planner
from specmeter.tune.search import Budget, Search
from specmeter.tune.space import Candidate, Space
from specmeter.tune.trial import Observation, Stop

DEFAULT_STEPS = 3
BASELINE, DEFAULT, TUNED = "baseline", "default", "tuned"
ROLES = (BASELINE, DEFAULT, TUNED)
THRESHOLD = 0.01


@dataclass
class SwitchedRunner:
    """tune's runner on a server whose steps are switched: a block has all prompts of each candidate, in a drawn order.

    (The command's own runner switches at every prompt; here a short request goes over each change, so fewer are made.)
    """

    server: Server
    prompts: Sequence[Prompt]
    tokens: int
    seed: int = 0
    together: bool = field(default=True, init=False)

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        """One start: ``blocks`` blocks, the first left out; a candidate that ``stop`` names runs no further."""
        link, began = windows.link_of(self.server), time.monotonic()
        logs: dict[str, list[float]] = {c.key: [] for c in candidates}
        counts = {c.key: [0, 0] for c in candidates}
        dropped: set[str] = set()
        control.arm(link)
        try:
            meet(self.server, self.prompts)
            for block in range(blocks):
                alive = [c for c in candidates if c.key not in dropped]
                if len(alive) == 1:
                    break
                for key, found in self._block(alive, block).items():
                    if block >= DROPPED_BLOCKS:
                        rates = [math.log(rate) for a in found if (rate := a.request.decode_rate)]
                        logs[key].append(sum(rates) / len(rates))
                    counts[key][0] += sum(len(a.ids) - 1 for a in found if a.cycles)
                    counts[key][1] += sum(a.cycles or 0 for a in found)
                if block >= DROPPED_BLOCKS:
                    dropped |= stop({key: values for key, values in logs.items() if key not in dropped})
        finally:
            control.disarm(link)
        share = (time.monotonic() - began) / len(candidates)
        return [
            Observation(
                c, level, start, tuple(logs[c.key]), share, "", c.key in dropped,
                counts[c.key][0] / counts[c.key][1] if counts[c.key][1] else None,
            )
            for c in candidates
        ]  # fmt: skip

    def _block(self, alive: Sequence[Candidate], block: int) -> dict[str, list[Answer]]:
        rng = random.Random(f"{self.seed}-{block}")
        found = {}
        for c in rng.sample(list(alive), len(alive)):
            switch(self.server, self.prompts, c.setting.steps)
            load = Load(1, self.tokens, 1, len(self.prompts))
            answers = drive(self.server.url, self.prompts, load, f"{c.label}-{block}", c.label).answers
            check(windows.link_of(self.server), c.setting.steps)
            errors = [answer.request.error for answer in answers if answer.request.error]
            if errors:
                raise RuntimeError(f"{c.label}: {errors[0]}")
            found[c.key] = answers
        return found


def search(
    server: Server, prompts: Sequence[Prompt], steps: Sequence[int], tokens: int, blocks: int, journal: Path
) -> dict[str, Any]:
    """The best speculative setting of one start, and all that the search saw; rates are those of a switched server.

    There k=0 is no plain decoding: the draft's forward still runs (docs/sweep.md).
    """
    start = Candidate(Setting.of(DEFAULT_STEPS))
    planner = Planner(Space(tuple(Setting.of(k) for k in steps)), start, None, 0)
    facts = {"engine": "sglang", "steps": str(list(steps)), "load": f"{len(prompts)} x {tokens}, {blocks} blocks"}
    with Journal(journal, facts) as kept:
        found = Search(planner, SwitchedRunner(server, prompts, tokens), kept, Budget(), 1, blocks, _say)
        found.run(start)
        best, first = found.best(True), found.best()
    if best is None or first is None:
        raise RuntimeError("the search found no speculative setting")
    rows = {
        o.candidate.setting.steps: {
            "tok_s": math.exp(o.mean) if o.mean is not None else None,
            "block_logs": list(o.logs),
            "accept_length": o.accept_length,
            "raced_out": o.stopped,
            "cause": o.cause,
        }
        for o in found.observations
    }
    told = ", ".join(f"k={k} {row['tok_s'] or 0:.0f}" for k, row in sorted(rows.items()))
    line = f"tuned to {best.label} (best of the start: {first.label}); tok/s: {told}"
    return {"line": line, "tuned": best.setting.steps, "best": first.setting.steps, "rows": rows}


def _say(text: str) -> None:
    print(text, flush=True)


def predict(run: Path, steps: Sequence[int]) -> dict[str, Any]:
    """The cost model's curve from one profiled run, as ``specmeter explain RUN`` draws it, before anything is tuned."""
    evidence = evidence_of([specmeter.load(run)])
    rows = curve(evidence, sorted(set(steps) - {0}))
    found = {row.steps: {**row_json(row), "plain_tok_s": _plain(row)} for row in rows}
    best = max(rows, key=lambda row: row.tok_s.point)
    return {
        "line": f"from {evidence.now} steps: best {best.steps}, "
        + ", ".join(f"k={row.steps} {row.tok_s.point:.0f}" for row in rows),
        "from_steps": evidence.now,
        "best": best.steps,
        "pays": best.speedup.point > 1 if best.speedup else None,
        "would_not_run": [row.steps for row in rows if row.tok_s.point < (1 - HOPELESS) * best.tok_s.point],
        "rows": found,
    }


def _plain(row: Any) -> float | None:
    return float(row.tok_s.point / row.speedup.point) if row.speedup else None


@dataclass(frozen=True)
class Proving:
    """The server starts of the proof that one set holds: the role of each and its place in the session."""

    roles: Mapping[str, str]
    places: Mapping[str, int]


def proving(rounds: Sequence[int]) -> Proving:
    """Starts ``baseline.1``, ``default.1``, ``tuned.1`` and so on; places in the session in an order drawn by seed."""
    places = {}
    for number in rounds:
        for place, role in enumerate(random.Random(number).sample(ROLES, len(ROLES))):
            places[f"{role}.{number}"] = len(ROLES) * (number - 1) + place
    return Proving({name: name.partition(".")[0] for name in places}, places)


def told_apart(requests: Sequence[Request]) -> dict[str, Any]:
    """Default and tuned against the baseline, and tuned against the default, the start as the unit.

    ``compare``: as ``specmeter compare`` says it, a drift over the session in its model. ``welch``: Welch's t on the
    logarithms of the start means, which is enough where starts were measured by turns.
    """
    arms = [name for name in ROLES if any(r.setting == name for r in requests)]
    if len(arms) < 2:
        return {"reason": f"only {arms or 'nothing'} was measured"}
    against = analyse_compare([ArmFacts(name) for name in arms], requests, THRESHOLD)
    pairs = [*against["pairs"]]
    if {DEFAULT, TUNED} <= set(arms) and arms[0] != DEFAULT:
        pairs += analyse_compare([ArmFacts(DEFAULT), ArmFacts(TUNED)], requests, THRESHOLD)["pairs"]
    rates = {arm["name"]: arm["start_rates_tok_s"] for arm in against["arms"]}
    welch = {
        f"{pair['arm']}/{pair['against']}": ratio_interval(
            rates[pair["arm"]], rates[pair["against"]], "server start"
        ).as_json()
        for pair in pairs
        if rates[pair["arm"]] and rates[pair["against"]]
    }
    return {"arms": against["arms"], "pairs": pairs, "welch": welch, "start_percent": against["start_percent"],
            "block_percent": against["block_percent"], "verdict": against["verdict"]}  # fmt: skip


def labelled(answers: Sequence[Answer], role: str, place: int, block: int) -> list[Request]:
    """The requests of one block of one start, as ``analyse_compare`` wants them named."""
    return [
        replace(answer.request, setting=role, start=place, block=block, request_id=f"{role}-{place}-{block}-{n}")
        for n, answer in enumerate(answers)
    ]
