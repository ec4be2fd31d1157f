"""Tune against the truth: the whole grid of step counts from interleaved starts, then tune from nothing on five seeds.

For each prompt set, `grid` runs k = 1..6 in four starts a point or more (drawn order), one setting a start; `live` runs
the search of `specmeter tune` on the real server, `replay` on starts drawn from the recorded grid. It tells the mean of
the choice against the grid's best, whether the interval on their ratio holds 1, and the search's share of the grid's
server-seconds (its budget of starts is `--share` of the grid's; the proof's starts come after the choice and on top).

    python benchmarks/tune_truth.py grid --out truth.json                        # --shared: one start serves all sets
    python benchmarks/tune_truth.py live --grid truth.json --out live.json       # 5 seeds
    python benchmarks/tune_truth.py replay --grid truth.json --out replay.json   # 5 seeds
    ... -- vllm serve MODEL --speculative-config '{...}'                         # another engine
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.analysis.compare import DROPPED_BLOCKS
from specmeter.analysis.stats import ratio_interval
from specmeter.bench.client import Outcome
from specmeter.bench.load import as_request
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt, load_prompts
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Probing
from specmeter.engines import ServerSpec, Setting
from specmeter.engines.spec import engine_of
from specmeter.trace.rundir import RunWriter
from specmeter.tune.journal import Journal
from specmeter.tune.planner import Planner, Predict
from specmeter.tune.predict import predictions
from specmeter.tune.search import Budget, Search
from specmeter.tune.space import Candidate, Space, settings_of
from specmeter.tune.trial import LiveRunner, Observation, Stop

SETS = {"chat": ("chat", "reasoning"), "code": ("code", "maths")}


class RecordedRunner:
    """Answers each start with one of the candidate's recorded starts, drawn by seed without repetition while it can."""

    together = False

    def __init__(self, grid: Sequence[Observation], seed: int) -> None:
        self._left: dict[str, list[Observation]] = {}
        for o in grid:
            self._left.setdefault(o.candidate.key, []).append(o)
        self._rng = random.Random(seed)
        for starts in self._left.values():
            self._rng.shuffle(starts)

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        """The next recorded start of the one candidate; one outside the grid cannot run."""
        (candidate,) = candidates
        starts = self._left.get(candidate.key)
        if not starts:
            return [Observation(candidate, level, start, (), 0.0, cause="not in the grid")]
        found = starts[0]
        starts.append(starts.pop(0))
        return [Observation(candidate, level, start, found.logs[: blocks - 1], found.seconds)]


def main() -> None:
    """Run one stage and write its JSON."""
    args = _arguments()
    spec = _spec(args.command_words)
    document: dict[str, Any]
    if args.stage == "grid" and args.shared:
        document = shared_grid(args, spec)
    elif args.stage == "grid":
        document = {name: grid(args, spec, _prompts(args, name)) for name in args.sets.split(",")}
    else:
        truth = json.loads(args.grid.read_text())["sets"]
        document = {name: tuned(args, spec, name, truth[name]["starts"]) for name in args.sets.split(",")}
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "engine": spec.engine}
    args.out.write_text(json.dumps({"stage": args.stage, **machine, "sets": document}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("grid", "live", "replay"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--grid", type=Path, help="what `grid` wrote")
    parser.add_argument("--profile", type=Path, action="append", default=[], help="a profile for the cost model")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.3, help="of the grid's starts that the search may use")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--shared", action="store_true", help="grid: one start serves every set")
    parser.add_argument("command_words", nargs="*", metavar="-- CMD")
    return parser.parse_args()


def _spec(words: Sequence[str]) -> ServerSpec:
    command = tuple(words) or (sys.executable, "-m", "specmeter", "serve")
    return ServerSpec(engine_of(command), command=command)


def _prompts(args: argparse.Namespace, name: str) -> tuple[Prompt, ...]:
    return load_prompts(None, SETS[name]).sample(args.requests, 0)


def _live(
    args: argparse.Namespace, spec: ServerSpec, prompts: tuple[Prompt, ...], seed: int, folder: Path
) -> LiveRunner:
    writer = RunWriter.create(folder, ["tune_truth"])
    return LiveRunner(spec, prompts, Sending(args.max_tokens, seed=seed), Probing(probes=False), writer, Progress())


def grid(args: argparse.Namespace, spec: ServerSpec, prompts: tuple[Prompt, ...]) -> dict[str, Any]:
    """Every step count and the baseline, ``--starts`` rounds in a drawn order, one setting a start."""
    found: list[Observation] = []
    candidates = [Candidate(Setting.of(k)) for k in range(args.steps + 1)]
    with tempfile.TemporaryDirectory() as folder:
        runner = _live(args, spec, prompts, 0, Path(folder) / "run")
        rng = random.Random(0)
        for _ in range(args.starts):
            for candidate in rng.sample(candidates, len(candidates)):
                found += runner.run([candidate], 1, len(found), args.blocks, lambda logs: set())
    _told(found)
    return {"starts": [o.as_json() for o in found]}


class SharedRunner(LiveRunner):
    """Keeps what each request took and yielded, by prompt set, so that one start is an observation of every set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[Outcome] = []

    def _block(self, *args: Any, **more: Any) -> list[tuple[str, Outcome]]:
        found = super()._block(*args, **more)
        self.seen += [outcome for _, outcome in found]
        return found


def shared_grid(args: argparse.Namespace, spec: ServerSpec) -> dict[str, Any]:
    """As ``grid``, the prompts of all sets in each start.

    A set's observation has the blocks' mean log rates over its own prompts, and the seconds that a start with these
    prompts alone would have taken: the start's without the other sets' requests.
    """
    sets = {name: _prompts(args, name) for name in args.sets.split(",")}
    owner = {prompt.prompt_id: name for name, prompts in sets.items() for prompt in prompts}
    found: dict[str, list[Observation]] = {name: [] for name in sets}
    candidates, rng, number = [Candidate(Setting.of(k)) for k in range(args.steps + 1)], random.Random(0), 0
    every = tuple(prompt for prompts in sets.values() for prompt in prompts)
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter.create(Path(folder) / "run", ["tune_truth"])
        how = Sending(args.max_tokens, seed=0), Probing(probes=False), writer, Progress()
        runner = SharedRunner(spec, every, *how)
        for candidate in [c for _ in range(args.starts) for c in rng.sample(candidates, len(candidates))]:
            runner.seen = []
            [whole] = runner.run([candidate], 1, number, args.blocks, lambda logs: set())
            for name, kept in found.items():
                own = [o for o in runner.seen if owner[o.call.prompt.prompt_id] == name]
                others_s = sum(o.end_ns - o.send_ns for o in runner.seen if o not in own) / 1e9
                kept.append(replace(whole, logs=_logs(own, args.blocks), seconds=whole.seconds - others_s))
            number += 1
    for name, kept in found.items():
        print(name)
        _told(kept)
    return {name: {"starts": [o.as_json() for o in kept]} for name, kept in found.items()}


def _logs(outcomes: Sequence[Outcome], blocks: int) -> tuple[float, ...]:
    """Mean log decode rate of each kept block."""
    found = []
    for block in range(DROPPED_BLOCKS, blocks):
        rates = [as_request(o).decode_rate for o in outcomes if o.call.block == block]
        known = [math.log(rate) for rate in rates if rate]
        found += [sum(known) / len(known)] if known else []
    return tuple(found)


def _told(found: Sequence[Observation]) -> None:
    for label, rates in _rates(found).items():
        print(f"{label:10} {np.mean(rates):8.2f} tok/s  starts {', '.join(f'{rate:.1f}' for rate in rates)}")


def _rates(observations: Sequence[Observation]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for o in observations:
        if o.mean is not None:
            found.setdefault(o.candidate.setting.label, []).append(math.exp(o.mean))
    return found


def tuned(
    args: argparse.Namespace, spec: ServerSpec, name: str, starts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The search on every seed against the grid's truth."""
    truth = [Observation.from_json(start) for start in starts]
    rates = {label: values for label, values in _rates(truth).items() if label != "baseline"}
    best = max(rates, key=lambda label: float(np.mean(rates[label])))
    grid_s = sum(o.seconds for o in truth if o.candidate.setting.steps)
    rows = []
    for seed in range(args.seeds):
        choice, used, count = _one(args, spec, name, truth, seed)
        ratio = ratio_interval(rates[choice], rates[best], "server start") if choice != best else None
        row = {
            "seed": seed,
            "choice": choice,
            "grid_best": best,
            "worse_by_percent": 100 * (1 - float(np.mean(rates[choice]) / np.mean(rates[best]))),
            "distinguishable": bool(ratio is not None and ratio.high < 1),
            "search_starts": count,
            "search_server_s": used,
            "grid_server_s": grid_s,
            "share_percent": 100 * used / grid_s,
        }
        rows.append(row)
        told = "worse" if row["distinguishable"] else "not told apart"
        print(
            f"{name} seed {seed}: {choice} (grid: {best}), worse by {row['worse_by_percent']:.2f} %, {told}, ", end=""
        )
        print(f"{row['share_percent']:.1f} % of the grid's server-seconds")
    return rows


def _one(
    args: argparse.Namespace, spec: ServerSpec, name: str, truth: Sequence[Observation], seed: int
) -> tuple[str, float, int]:
    """The chosen speculative setting, server-seconds and starts of one search from nothing."""
    trials = max(2, int(args.share * args.starts * args.steps))
    space = Space(settings_of(range(args.steps + 1), [1], []))
    predict: Predict | None = predictions(args.profile, space.settings) if args.profile else None
    planner = Planner(space, Candidate(Setting.of(2)), predict, seed)
    with tempfile.TemporaryDirectory() as folder:
        live = args.stage == "live"
        runner = (
            _live(args, spec, _prompts(args, name), seed, Path(folder) / "run") if live else RecordedRunner(truth, seed)
        )
        with Journal(Path(folder) / "journal.sqlite", {"seed": str(seed)}) as journal:
            search = Search(planner, runner, journal, Budget(trials=trials), 1, args.blocks, lambda text: None)
            search.run(Candidate(Setting.of(2)))
            chosen = search.best(speculative=True)
            assert chosen is not None
            return chosen.setting.label, sum(o.seconds for o in search.observations), search.starts()


if __name__ == "__main__":
    main()
