"""The story at its own scale: SGLang in tensor parallel over 4 and 8 GPUs, in parts that outlive the end of a call.

    python benchmarks/eight_gpu.py run SITE WORK --out OUT --tp 8 4 --shapes 70b moe200b --starts 3 [--budget 540]
    python benchmarks/eight_gpu.py rehearse WORK --tp 2 4          # miniature ranks (tests/support/mini_ranks), no GPU
    python benchmarks/eight_gpu.py report WORK                      # benchmarks/eight_report.py, on any machine

Call ``run`` again until it says that all parts are done (exit 0; 75: call again). A part is one start of one arm, with
its measurements (cycles by phase at batch 1 and 8, a deep window, the run directory), so a killed call loses one start.
Arms: plain decoding, the default 3 steps, 2 steps (the story's), and 2 steps with other communication: NCCL instead of
custom all-reduce, and NCCL with the low-latency protocol. The draft alone runs on one GPU, with a few layers of
the target: what its phases cost there against what they cost among N ranks is the price of drafting at the target's
tensor parallel size. All arms of a round come before the second round, so that rounds are what intervals are over.
Weights are dummies and acceptance is simulated, as in sglang_dummy_gpu.py, whose starts these are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_windows as windows
from eight_report import report
from gpu_client import Load, Prompt
from gpu_fleet import Place, Server, Start, eagle
from gpu_models import SHAPES
from gpu_pack import packer
from gpu_parts import CLOSING_S, Part, run_parts
from gpu_steps import Step, read, run_steps
from gpu_unpack import unpack
from sglang_dummy_gpu import FIRST_VERSION, SIMULATED, Plan

from specmeter.errors import SpecmeterError

DEFAULT, TUNED = 3, 2
# EAGLE-3 captures states of layers 2, n / 2 and n - 3, so a target needs a few.
DRAFT_LAYERS = 8
DEEP_CYCLES = 100
START_S = 260.0
LOADS = {"1": Load(rounds=3, tokens=160), "8": Load(rounds=2, tokens=128, at_once=8, prompts=8)}
SMALL = {"1": Load(rounds=2, tokens=360, prompts=3)}
MINI = Path(__file__).resolve().parents[1] / "tests" / "support" / "mini_ranks"


@dataclass(frozen=True)
class Arm:
    """One way to serve: ``spec`` says whether it drafts, ``about`` what it is for the report."""

    name: str
    about: str
    command: tuple[str, ...]
    spec: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Body:
    """A server as measured: its arms at one size. ``deep`` cycles under the profiler (0: it cannot be had)."""

    name: str
    place: Place
    arms: tuple[Arm, ...]
    loads: Mapping[str, Load]
    deep: int
    start_s: float

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What is asked."""
        return self.place.prompts


def steps_of(body: Body, arm: Arm) -> tuple[Step, ...]:
    """What is measured on one start of an arm, in order; a failed measurement does not stop the next."""
    steps = [
        Step(f"phases{size}", arm.name, 20 if body.deep else 2, partial(_phases, body, arm, size))
        for size in body.loads
    ]
    if body.deep:
        steps.append(Step("deep1", arm.name, 45, partial(_deep, body, arm)))
    return (*steps, Step("run", arm.name, 15 if body.deep else 2, partial(_kept, body, arm), (steps[0].name,)))


def _phases(body: Body, arm: Arm, size: str, server: Server, out: Path) -> dict[str, Any]:
    return windows.phases(server, body.prompts, body.loads[size], out, f"phases{size}", _baseline(body, arm, out))


def _deep(body: Body, arm: Arm, server: Server, out: Path) -> dict[str, Any]:
    setting = windows.SPEC if arm.spec else windows.PLAIN
    return windows.deep(server, body.prompts, body.deep, 1, setting)


def _kept(body: Body, arm: Arm, server: Server, out: Path) -> dict[str, Any]:
    return windows.save_run(server, out, _baseline(body, arm, out))


def _baseline(body: Body, arm: Arm, out: Path) -> Any:
    """The plain arm's step of the same round; None for that arm itself."""
    if not arm.spec:
        return None
    plain = out.parent / out.name.replace(f".{arm.name}.", ".plain.")
    return windows.baseline_of(read(plain, "phases1") if plain.is_dir() else None)


def parts_of(bodies: Sequence[Body], starts: int, before: Sequence[Part] = ()) -> list[Part]:
    """A part a start: round by round, body by body, arm by arm."""
    needs = tuple(part.name for part in before)
    parts = list(before)
    for number in range(1, starts + 1):
        for body in bodies:
            for arm in body.arms:
                parts.append(Part(f"{body.name}.{arm.name}.{number}", partial(_start, body, arm), _limit(body), needs))
    return parts


def _limit(body: Body) -> float:
    return body.start_s + sum(step.seconds for step in steps_of(body, body.arms[0]))


def _start(body: Body, arm: Arm, results: Path) -> None:
    """One part: start the arm's server, measure what is not measured yet, stop it."""
    start = Start(arm.name, arm.command, arm.env)
    run_steps(body.place, [start], steps_of(body, arm), results, _limit(body) - 10)


def sglang_bodies(site: Path, work: Path, shapes: Sequence[str], sizes: Sequence[int]) -> list[Body]:
    """The shapes at each tensor parallel size, and the draft of each shape alone on one GPU."""
    found = []
    for name in shapes:
        for tp in sizes:
            plan = Plan(SHAPES[name], tp, work)
            place = Place(work, site, plan.prompts)
            found.append(Body(f"{name}-tp{tp}", place, _arms(plan), LOADS, DEEP_CYCLES, START_S))
        thin = replace(SHAPES[name], name=f"{name}-draft", layers=DRAFT_LAYERS)
        alone = Plan(thin, 1, work)
        arm = Arm("draft", "the draft alone, before a few layers", alone.command(*eagle(alone.head, DEFAULT)), True,
                  dict(SIMULATED))  # fmt: skip
        found.append(Body(f"{name}-draft-tp1", Place(work, site, alone.prompts), (arm,), LOADS, DEEP_CYCLES, START_S))
    return found


def _arms(plan: Plan) -> tuple[Arm, ...]:
    base = dict(FIRST_VERSION)
    spec = {**base, **SIMULATED}
    tuned, alone = plan.command(*eagle(plan.head, TUNED)), "--disable-custom-all-reduce"
    return (
        Arm("plain", "no speculation", plan.command(), False, base),
        Arm("default", f"{DEFAULT} steps", plan.command(*eagle(plan.head, DEFAULT)), True, spec),
        Arm("tuned", f"{TUNED} steps", tuned, True, spec),
        Arm("nccl", f"{TUNED} steps, NCCL instead of custom all-reduce", (*tuned, alone), True, spec),
        Arm("nccl-ll", f"{TUNED} steps, NCCL with NCCL_PROTO=LL", (*tuned, alone), True, {**spec, "NCCL_PROTO": "LL"}),
    )


def mini_bodies(work: Path, sizes: Sequence[int]) -> list[Body]:
    """Miniature ranks: the whole control flow, without a GPU, a profiler or a model."""
    lib = work / "lib"
    if not lib.exists():
        shutil.copytree(MINI / "minitp", lib / "minitp", ignore=shutil.ignore_patterns("__pycache__"))
        (lib / "minitp-1.0.dist-info").mkdir()
        (lib / "minitp-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: minitp\nVersion: 1.0\n")
    place = Place(work, lib, (tuple(range(8)), tuple(range(4, 12)), tuple(range(9))), None, MINI / "minitp.toml")
    bodies = []
    for tp in sizes:
        front = (sys.executable, "-u", str(MINI / "front.py"), "--tp", str(tp))
        arms = (
            Arm("plain", "no speculation", (*front, "--steps", "0"), False),
            Arm("default", f"{DEFAULT} steps", (*front, "--steps", str(DEFAULT))),
            Arm("tuned", f"{TUNED} steps", (*front, "--steps", str(TUNED))),
        )
        bodies.append(Body(f"mini-tp{tp}", place, arms, SMALL, 0, 40.0))
    return bodies


def main() -> None:
    """Run, rehearse or report."""
    args = parse()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.word == "report":
        report(args.work)
        return
    if args.word == "rehearse":
        bodies, before, out = mini_bodies(args.work, args.tp), [], args.out or args.work / "out"
    else:
        bodies = sglang_bodies(args.site, args.work, args.shapes, args.tp)
        before, out = [Part("unpack", partial(_unpack, args.work, args.source), 200.0)], args.out
    if args.arms:
        bodies = [replace(body, arms=tuple(arm for arm in body.arms if arm.name in args.arms)) for body in bodies]
    parts = parts_of([body for body in bodies if body.arms], args.starts, before)
    longest = max(part.limit_s for part in parts)
    if longest > args.budget - CLOSING_S:
        raise SpecmeterError(f"--budget {args.budget:g} is too short.", f"The longest part may take {longest:g} s.")
    code = run_parts(parts, args.work, args.budget, packer(out))
    try:
        report(args.work)
    finally:
        sys.stdout.flush()
    sys.exit(code)


def _unpack(work: Path, source: Path, results: Path) -> None:
    if code := unpack(work, source):
        raise RuntimeError(f"parts of the bundle are missing (exit {code}): send the rest and call again")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = parser.add_subparsers(dest="word", required=True)
    run = words.add_parser("run", help="on the machine with the GPUs")
    run.add_argument("site", type=Path, help="SGLang and what it imports")
    rehearse = words.add_parser("rehearse", help="the control flow, on miniature ranks")
    for parts in (run, rehearse, words.add_parser("report", help="what is measured so far")):
        parts.add_argument("work", type=Path)
    for parts, sizes, starts, budget in ((run, [8, 4], 3, 540.0), (rehearse, [2], 1, 240.0)):
        parts.add_argument("--tp", type=int, nargs="+", default=sizes)
        parts.add_argument("--arms", nargs="+", default=[], metavar="NAME", help="these alone")
        parts.add_argument("--starts", type=int, default=starts, help="rounds: what intervals are over")
        parts.add_argument("--budget", type=float, default=budget, help="seconds of this call")
        parts.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if "OUT" in os.environ else None)
    run.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["70b", "moe200b"])
    run.add_argument("--from", dest="source", type=Path, default=Path(".gpu"), help="where the bundle's parts lie")
    args = parser.parse_args()
    if args.word == "run" and args.out is None:
        parser.error("--out is needed where $OUT is not set")
    return args


if __name__ == "__main__":
    main()
