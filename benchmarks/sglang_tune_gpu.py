"""The tuned setting of SGLang 0.5.16 on one H200 against the default (3 steps) and no speculation, unattended.

    python benchmarks/sglang_tune_gpu.py SITE MODEL WORK --out OUT [--budget 560] [--shape smollm2|8b]
    python benchmarks/sglang_tune_gpu.py SITE MODEL WORK --out OUT --command [--confirm 0]     # specmeter tune itself

1. A profile at 3 steps, a deep window in it, and of it what the cost model says of every step count, before anything
   is tuned. 2. ``specmeter tune``'s search in one start, whose steps are switched (gpu_tuning.py). 3. The proof: three
   starts a side of the tuned setting, of 3 steps and of no speculation, none of which knows specmeter, side by side and
   measured by turns in drawn orders (8b: two sides by side twice, then the third of each, since nine do not fit).
   Ratios have the start as their unit.

``smollm2``: SmolLM2 with the packaged head, also eight requests at once in the proof; ``8b`` (MODEL is not read):
Llama-3-8B's shape, dummy weights and simulated acceptance of ``ACCEPT`` tokens a cycle, as sglang_dummy_gpu.py has it.
A later call on the same machine does what is left (exit 75). OUT receives results.tgz in parts; WORK/results/tune-SHAPE
has results.json and tune.txt. ``--rehearse``: the flow against the miniature server of the tests, without a GPU.

``--command`` runs the command that a user would, with a journal, and goes on with it in a later call; its starts come
one after the other and its proof is repeated as a whole, so with ``--confirm 3`` it takes more than a call has.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_tuning as tuning
import gpu_windows as windows
from gpu_client import CHATS, Load, Prompt, drive, id_prompts
from gpu_fleet import Fleet, Place, Server, Start, eagle, miniature, sglang
from gpu_models import SHAPES, copy_head, write_models
from gpu_pack import packer, show_logs
from gpu_parts import ALL_DONE, CLOSING_S, MORE, Part, run_parts
from gpu_steps import read, write
from gpu_switching import adaptive_flags
from gpu_tune_text import table
from sglang_dummy_gpu import SIMULATED

from specmeter.trace import Request

STEPS = (0, 1, 2, 3, 4, 5, 6)
HEAD = Path(__file__).resolve().parents[1] / "src/specmeter/eagle/heads/smollm2-135m-v1"
START_S, START_LATER_S = 330.0, 150.0
DEEP = 100
SIZES = {"1": "one request at a time", "8": "eight at once"}


@dataclass(frozen=True)
class Subject:
    """A model: its commands, its load and which starts of the proof lie side by side.

    ``loads`` are of one block at each number of requests at once; ``passes`` blocks a start, the first left out.
    """

    name: str
    plain: tuple[str, ...]
    head: Path
    prompts: Sequence[Prompt]
    env: Mapping[str, str]
    rounds: tuple[tuple[int, ...], ...]
    loads: Mapping[str, Load]
    passes: int
    searched: tuple[int, int, int]

    def spec(self, steps: int) -> tuple[str, ...]:
        """The command with so many draft steps; 0: without speculation."""
        return (*self.plain, *eagle(self.head, steps)) if steps else self.plain

    def env_of(self, steps: int) -> Mapping[str, str]:
        """What its environment adds."""
        return self.env if steps else {}


def smollm2(model: Path, work: Path, starts: int = 3) -> Subject:
    """All nine starts of the proof fit beside each other. 65,536 tokens of cache were 1.4 GiB a server."""
    plain = sglang(model, "--mem-fraction-static", "0.7", "--max-total-tokens", "32768")
    loads = {"1": Load(1, 192, 1, 6), "8": Load(2, 128, 8, 8)}
    return Subject(
        "smollm2",
        plain,
        copy_head(HEAD, work / "head"),
        CHATS,
        {},
        (tuple(range(1, starts + 1)),),
        loads,
        5,
        (6, 160, 5),
    )


def dense8b(work: Path, starts: int = 3) -> Subject:
    """Seven servers of 17 to 19 GiB fit into the card; 8,192 tokens of cache are 1 GiB each."""
    target, head = write_models(work / "models", SHAPES["8b"])
    plain = sglang(
        target, "--load-format", "dummy", "--skip-tokenizer-init", "--mem-fraction-static", "0.92",
        "--max-total-tokens", "8192",
    )  # fmt: skip
    prompts, loads = id_prompts(SHAPES["8b"].vocab), {"1": Load(1, 160, 1, 6)}
    rounds = tuple(tuple(range(n, min(n + 2, starts + 1))) for n in range(1, starts + 1, 2))
    return Subject("8b", plain, head, prompts, SIMULATED, rounds, loads, 5, (4, 160, 5))


class Tuning:
    """One subject's measurements in its results folder; each has a file of its own, so a later call goes on."""

    def __init__(self, subject: Subject, place: Place, work: Path, out: Path, end: float, rehearse: bool) -> None:
        self.subject, self.place, self.work, self.out, self.end = subject, place, work, out, end
        self.rehearse = rehearse

    def run(self) -> None:
        """All that is left and fits. Raises RuntimeError that names what is missing then."""
        try:
            for number, rounds in enumerate(self.subject.rounds, 1):
                if self._missing(number):
                    self._set(number, rounds)
        finally:
            self.conclude()
        left = [name for n in range(1, len(self.subject.rounds) + 1) for name in self._missing(n)]
        if left:
            raise RuntimeError(f"not measured: {', '.join(left)}")

    def _missing(self, number: int) -> list[str]:
        names = [f"proof{number}.{size}" for size in self.subject.loads]
        if number == 1:
            names = ["profile", "search", *names]
        return [name for name in names if read(self.out, name) is None]

    def _set(self, number: int, rounds: Sequence[int]) -> None:
        """One set of servers side by side: of the first also the profiled and the switched one."""
        proving, tuned = tuning.proving(rounds), (read(self.out, "search") or {}).get("tuned")
        first = self._before() if number == 1 else []
        starts = [*first, *(self._proof(name, role, tuned) for name, role in proving.roles.items()
                            if role != tuning.TUNED or tuned)]  # fmt: skip
        place, starts = self._placed(starts)
        with Fleet(place, starts) as fleet:
            fleet.wait(self._patience(START_S if number == 1 else START_LATER_S))
            self._told(fleet, number)
            if first:
                self._measured_before(fleet)
                fleet.drop([start.name for start in first])
            tuned = (read(self.out, "search") or {})["tuned"]
            more = [self._proof(name, role, tuned) for name, role in proving.roles.items() if name not in fleet.servers]
            if more:
                fleet.add(self._placed(more)[1])
                fleet.wait(self._patience(START_LATER_S))
                self._told(fleet, number)
            for size, load in self.subject.loads.items():
                if read(self.out, f"proof{number}.{size}") is None:
                    self._proven(fleet, proving, f"proof{number}.{size}", load)

    def _told(self, fleet: Fleet, number: int) -> None:
        facts = {f"{number}.{name}": fact for name, fact in fleet.facts().items()}
        write(self.out, "starts", {**(read(self.out, "starts") or {}), **facts})

    def _placed(self, starts: Sequence[Start]) -> tuple[Place, list[Start]]:
        return miniature(self.place, starts, STEPS) if self.rehearse else (self.place, list(starts))

    def _patience(self, most_s: float) -> float:
        return max(5.0, min(most_s, self.end - time.monotonic() - 60))

    def _before(self) -> list[Start]:
        """The profiled servers and the switched one, as far as they are still needed.

        The switched one starts at the most steps: SGLang's buffer of logits has as many rows as the graphs of the
        start's own steps need, and it ends in an assertion where a candidate has more (model_executor/
        graph_shared_output.py of 0.5.16: with 8 requests and 3 steps 32 rows, 4 steps need 40).
        """
        subject, found = self.subject, []
        if read(self.out, "profile") is None:
            found = [
                Start("profile", subject.spec(tuning.DEFAULT_STEPS), subject.env),
                Start("profile-plain", subject.plain),
            ]
        if read(self.out, "search") is None:
            command = (*subject.spec(STEPS[-1]), *adaptive_flags(self.work, STEPS))
            found.append(Start("switched", command, subject.env, knobs=("draft_steps",), knob_alone=True))
        return found

    def _proof(self, name: str, role: str, tuned: int | None) -> Start:
        """A server that knows nothing of specmeter."""
        steps = {tuning.BASELINE: 0, tuning.DEFAULT: tuning.DEFAULT_STEPS, tuning.TUNED: tuned or 0}[role]
        return Start(name, self.subject.spec(steps), self.subject.env_of(steps), linked=False)

    def _measured_before(self, fleet: Fleet) -> None:
        if read(self.out, "profile") is None:
            self._kept("profile", lambda: self._profile(fleet))
        if read(self.out, "predicted") is None and read(self.out, "profile") is not None:
            self._kept("predicted", lambda: tuning.predict(self.out / "run-profile", STEPS))
            self._kept("explained", self._explained)
        if read(self.out, "search") is None:
            self._kept("search", lambda: self._search(fleet))
        if read(self.out, "search") is None:
            # The proof is worth its time all the same: of what was foretold, and it says so.
            steps = (read(self.out, "predicted") or {}).get("best") or STEPS[-1] - 1
            write(self.out, "search", {"line": f"no search: {steps} steps as foretold", "tuned": steps, "rows": {}})

    def _search(self, fleet: Fleet) -> dict[str, Any]:
        prompts, tokens, blocks = self.subject.searched
        with fleet.only("switched") as server:
            return tuning.search(
                server, self.subject.prompts[:prompts], STEPS, tokens, blocks, self.out / "journal.sqlite"
            )

    def _kept(self, name: str, measure: Any) -> None:
        """A measurement without which the proof can be: what fails is told."""
        began = time.monotonic()
        try:
            found = measure()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            (self.out / f"{name}.error.txt").write_text(f"{type(error).__name__}: {error}\n")
            return
        write(self.out, name, found)
        print(f"{name}: {time.monotonic() - began:.0f} s {found.get('line', '')}", flush=True)

    def _profile(self, fleet: Fleet) -> dict[str, Any]:
        """A window at 3 steps with a deep window after it, and one of plain decoding for the baseline's step."""
        prompts, load = self.subject.prompts, Load(rounds=2, tokens=160)
        with fleet.only("profile-plain") as server:
            plain = windows.phases(server, prompts, load, self.out, "profile-plain", None)
        baseline = windows.baseline_of(plain)
        with fleet.only("profile") as server:
            found = windows.phases(server, prompts, load, self.out, "profile", baseline)
            try:
                deep: dict[str, Any] = windows.deep(server, prompts, DEEP, 1)
            except RuntimeError as error:
                deep = {"reason": str(error)}
            saved = windows.save_run(server, self.out, baseline)
        return {**found, "plain": plain, "deep": deep, "saved": saved}

    def _explained(self) -> dict[str, Any]:
        """What ``specmeter explain`` prints of the profile."""
        words = [sys.executable, "-m", "specmeter", "explain", str(self.out / "run-profile"), "--upto", str(STEPS[-1])]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=self.place.env())
        (self.out / "explained.txt").write_text(done.stdout + done.stderr)
        return {"command": words[1:], "exit": done.returncode, "text": done.stdout}

    def _proven(self, fleet: Fleet, proving: tuning.Proving, name: str, load: Load) -> None:
        """Blocks of every start by turns; stops early, with whole turns, where the call's time ends."""
        up = [each for each in proving.roles if not fleet.servers[each].reason]
        rng, requests, longest = random.Random(name), [], 0.0
        ids: dict[str, dict[str, tuple[int, ...]]] = {}
        cycles: dict[str, list[float | None]] = {each: [] for each in up}
        for turn in range(self.subject.passes):
            began = time.monotonic()
            if turn >= 2 and self.end - began < 1.5 * longest:
                break
            for each in rng.sample(up, len(up)):
                with fleet.only(each) as server:
                    answers = self._block(server, load, f"{each}-{turn}")
                requests += tuning.labelled(answers.answers, proving.roles[each], proving.places[each], turn)
                cycles[each].append(answers.summary()["server_tokens_a_cycle"])
                ids.setdefault(each, answers.by_prompt())
            longest = max(longest, time.monotonic() - began)
        if not requests:
            raise RuntimeError(f"{name}: no start of the proof is up")
        kept = {"requests": [asdict(request) for request in requests], "accept_length": cycles, "load": asdict(load)}
        write(self.out, name, {**kept, "ids": {each: {p: list(i) for p, i in of.items()} for each, of in ids.items()}})
        print(f"{name}: {turn + 1} turns of {len(up)} starts, {longest:.0f} s the longest", flush=True)

    def _block(self, server: Server, load: Load, name: str) -> Any:
        drive(server.url, self.subject.prompts, Load(1, 48, load.at_once, load.at_once), "settle", "settle")
        return drive(server.url, self.subject.prompts, load, name, "proof")

    def conclude(self) -> None:
        """results.json and tune.txt, of what there is."""
        found: dict[str, Any] = {"subject": self.subject.name, "default_steps": tuning.DEFAULT_STEPS}
        for name in ("predicted", "search", "starts"):
            found[name] = read(self.out, name)
        for size in self.subject.loads:
            requests: list[Request] = []
            lengths: dict[str, Any] = {}
            ids: dict[str, Any] = {}
            for number in range(1, len(self.subject.rounds) + 1):
                part = read(self.out, f"proof{number}.{size}") or {"requests": [], "accept_length": {}, "ids": {}}
                requests += [Request(**row) for row in part["requests"]]
                lengths |= part["accept_length"]
                ids |= part["ids"]
            if requests:
                proof = {**tuning.told_apart(requests), "accept_length": lengths, "same_ids": same_ids(ids)}
                found[f"proof.{size}"] = proof
        write(self.out, "results", found)
        text = table(found, SIZES)
        (self.out / "tune.txt").write_text(text)
        print(text, flush=True)


def same_ids(ids: Mapping[str, Mapping[str, Sequence[int]]]) -> dict[str, str]:
    """Of each start: how many prompts have the first baseline's greedy answer."""
    first = next((name for name in sorted(ids) if name.startswith(tuning.BASELINE)), None)
    if first is None:
        return {}
    return {
        name: f"{sum(list(of[p]) == list(ids[first].get(p, [])) for p in of)} of {len(of)}" for name, of in ids.items()
    }


def command(subject: Subject, work: Path, site: Path, budget: float, confirm: int) -> int:
    """``specmeter tune`` itself on the default's command, with its journal; 0 done, 75 interrupted: call again."""
    words = [
        sys.executable, "-m", "specmeter", "tune", "--requests", "6", "--max-tokens", "160", "--blocks", "4",
        "--confirm", str(confirm), "--confirm-blocks", "4", "--minutes", "60", "--start-timeout", "200",
    ]  # fmt: skip
    again = sorted(work.glob("tune-run*/journal.sqlite"))
    where = (
        ["--journal", str(again[0]), "--out", str(work / f"tune-run-{len(list(work.glob('tune-run*')))}")]
        if again
        else ["--out", str(work / "tune-run")]
    )
    env = {**Place(work, site, ()).env(), **subject.env}
    work.mkdir(parents=True, exist_ok=True)
    with (work / "tune.log").open("a") as log:
        child = subprocess.Popen(
            [*words, *where, "--", *subject.spec(tuning.DEFAULT_STEPS)], env=env, stdout=log, stderr=log
        )
        try:
            code = child.wait(budget)
        except subprocess.TimeoutExpired:
            child.send_signal(2)  # finished starts are in the journal
            child.wait(30)
            code = MORE
    print((work / "tune.log").read_text()[-6000:], flush=True)
    return ALL_DONE if code == 0 else code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=560.0, help="seconds of this call")
    parser.add_argument("--shape", choices=("smollm2", "8b"), default="smollm2")
    parser.add_argument("--starts", type=int, default=3, help="of each side in the proof (default: 3)")
    parser.add_argument("--command", action="store_true", help="run specmeter tune itself")
    parser.add_argument("--confirm", type=int, default=0, help="proving starts a side, with --command (default: 0)")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    small = args.shape == "smollm2"
    subject = smollm2(args.model, args.work, args.starts) if small else dense8b(args.work, args.starts)
    if args.command:
        args.out.mkdir(parents=True, exist_ok=True)
        code = command(subject, args.work / "command", args.site, args.budget - CLOSING_S, args.confirm)
        subprocess.run(["tar", "czf", str(args.out / "command.tgz"), "-C", str(args.work), "command"], check=False)
        sys.exit(code)
    limit = args.budget - CLOSING_S - 5

    def tune(results: Path) -> None:
        out = args.work / "results" / f"tune-{subject.name}"
        out.mkdir(parents=True, exist_ok=True)
        place = Place(args.work, None if args.rehearse else args.site, subject.prompts)
        Tuning(subject, place, args.work, out, began + limit - 15, args.rehearse).run()

    code = run_parts((Part(f"tune-{subject.name}", tune, limit),), args.work, args.budget, packer(args.out))
    show_logs(args.work)
    sys.exit(code)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
