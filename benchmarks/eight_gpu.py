"""The story at its own scale: SGLang in tensor parallel over 4 and 8 GPUs, in parts that outlive the end of a call.

    python benchmarks/eight_gpu.py run SITE WORK --out OUT --tp 8 4 --shapes 70b moe200b --starts 3 [--budget 540]
    python benchmarks/eight_gpu.py run SITE WORK --out OUT --resume OUT_OF_ANOTHER_MACHINE ...
    python benchmarks/eight_gpu.py rehearse WORK --tp 2 4          # miniature ranks (tests/support/mini_ranks), no GPU
    python benchmarks/eight_gpu.py rehearse WORK --tp 2 3 4 --vllm PYTHON --budget 400       # vLLM on CPUs, no GPU
    python benchmarks/eight_gpu.py report WORK                      # benchmarks/eight_report.py, on any machine

Call ``run`` again until it says that all parts are done (exit 0; 75: call again). A part is one start of one arm
(eight_bodies.py), with its measurements (cycles by phase at batch 1 and 8, a deep window, the run directory), so a
killed call loses one start. On a machine that knows nothing of an earlier one, ``--resume`` takes what that one brought
back. All arms of a round come before the second round, so that rounds are what intervals are over; deep windows are
made in the first round, and of the default and of the draft alone in each. What the draft's phases cost on one GPU
against what they cost among N ranks is the price of drafting at the target's tensor parallel size. Weights are dummies
and acceptance is simulated, as in sglang_dummy_gpu.py, whose starts these are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_windows as windows
from eight_bodies import Arm, Body, mini_bodies, sglang_bodies, tuned_steps, vllm_bodies
from eight_report import report
from gpu_fleet import Server
from gpu_models import SHAPES
from gpu_pack import packer, restore
from gpu_parts import CLOSING_S, Part, run_parts
from gpu_steps import Step, read, run_steps
from gpu_unpack import unpack
from sglang_dummy_gpu import distinct_experts

from specmeter.errors import SpecmeterError

TEXTS = 4
DEEP_EACH_ROUND = ("default", "draft")


def steps_of(body: Body, arm: Arm, number: int) -> tuple[Step, ...]:
    """What is measured on start ``number`` of an arm, in order; a failed measurement does not stop the next."""
    if arm.role == "experts":
        return (Step("experts", arm.name, 40, partial(_experts, body)),)
    sizes = [size for size in body.loads if size == "1" or arm.role != "screen"]
    steps = [Step(f"phases{size}", arm.name, body.step_s, partial(_phases, body, arm, size)) for size in sizes]
    if body.deep and arm.role != "screen" and (number == 1 or arm.name in DEEP_EACH_ROUND):
        steps.append(Step("deep1", arm.name, 45, partial(_deep, body, arm)))
    return (*steps, Step("run", arm.name, min(15, body.step_s), partial(_kept, body, arm), (steps[0].name,)))


def _phases(body: Body, arm: Arm, size: str, server: Server, out: Path) -> dict[str, Any]:
    found = windows.phases(
        server, body.prompts, body.loads[size], out, f"phases{size}", _baseline(body, arm, out, size)
    )
    rates: dict[str, list[float]] = {}
    for request in server.requests:
        if request.request_id.startswith(f"phases{size}-") and not request.error and request.decode_rate:
            rates.setdefault(request.prompt_id, []).append(request.decode_rate)
    # Without the probes, and greedy: the text whose experts are counted.
    texts: dict[str, Any] = (
        windows.tokens(server, body.prompts[:TEXTS]) if size == "1" and body.shape is not None else {}
    )
    kept: dict[str, Any] = {key: texts[key] for key in ("ids_of", "distinct_ids", "ids") if key in texts}
    return {**found, **kept, "rates": rates}


def _deep(body: Body, arm: Arm, server: Server, out: Path) -> dict[str, Any]:
    setting = windows.SPEC if arm.spec else windows.PLAIN
    return windows.deep(server, body.prompts, body.deep, 1, setting)


def _kept(body: Body, arm: Arm, server: Server, out: Path) -> dict[str, Any]:
    return windows.save_run(server, out, _baseline(body, arm, out))


def _experts(body: Body, server: Server, out: Path) -> dict[str, Any]:
    texts = (read(out.parent / f"{body.name}.default.1", "phases1") or {}).get("ids_of")
    if not texts or body.shape is None:
        raise RuntimeError("the default arm's text, whose experts are to be counted, was not measured")
    return distinct_experts(server, body.prompts, texts, body.shape)


def _baseline(body: Body, arm: Arm, out: Path, size: str = "1") -> Any:
    """The plain arm's step of the same round at so many requests; None for that arm itself."""
    if not arm.spec:
        return None
    plain = out.parent / out.name.replace(f".{arm.name}.", ".plain.")
    return windows.baseline_of(read(plain, f"phases{size}") if plain.is_dir() else None)


def parts_of(bodies: Sequence[Body], starts: int, before: Sequence[Part] = ()) -> list[Part]:
    """A part a start: round by round, body by body, arm by arm."""
    needs = tuple(part.name for part in before)
    parts = list(before)
    for number in range(1, starts + 1):
        for body in bodies:
            for arm in body.arms:
                if number == 1 or not arm.once:
                    run = partial(_start, body, arm, number)
                    parts.append(Part(f"{body.name}.{arm.name}.{number}", run, _limit(body, arm, number), needs))
    return parts


def _limit(body: Body, arm: Arm, number: int) -> float:
    return body.start_s + sum(step.seconds for step in steps_of(body, arm, number))


def _start(body: Body, arm: Arm, number: int, results: Path) -> None:
    """One part: start the arm's server, measure, stop it.

    What an attempt that was cut off left is measured again: a start is what intervals are over, so all that is told of
    one is of one.
    """
    for step in steps_of(body, arm, number):
        (results / f"{step.name}.json").unlink(missing_ok=True)
    start = body.start(arm, tuned_steps(body, results.parent) if "{k}" in arm.about else 0)
    run_steps(body.place, [start], steps_of(body, arm, number), results, _limit(body, arm, number) - 10, body.start_s)


def main() -> None:
    """Run, rehearse or report."""
    args = parse()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.word == "report":
        report(args.work)
        return
    bodies, before, out = wanted(args)
    if args.arms:
        bodies = [replace(body, arms=tuple(arm for arm in body.arms if arm.name in args.arms)) for body in bodies]
    parts = parts_of([body for body in bodies if body.arms], args.starts, before)
    longest = max(part.limit_s for part in parts)
    if longest > args.budget - CLOSING_S:
        raise SpecmeterError(f"--budget {args.budget:g} is too short.", f"The longest part may take {longest:g} s.")
    if args.resume is not None:
        restore(args.resume, args.work, again=[part.name for part in before])
    code = run_parts(parts, args.work, args.budget, packer(out))
    try:
        report(args.work)
    finally:
        sys.stdout.flush()
    sys.exit(code)


def wanted(args: argparse.Namespace) -> tuple[list[Body], list[Part], Path]:
    """What is to be served, what comes before it, and where the results go."""
    if args.word == "run":
        before = [Part("unpack", partial(_unpack, args.work, args.source), 200.0)]
        return sglang_bodies(args.site, args.work, args.shapes, args.tp), before, args.out
    bodies = vllm_bodies(args.vllm, args.work, args.tp) if args.vllm else mini_bodies(args.work, args.tp)
    return bodies, [], args.out or args.work / "out"


def _unpack(work: Path, source: Path, results: Path) -> None:
    if code := unpack(work, source):
        raise RuntimeError(f"parts of the bundle are missing (exit {code}): send the rest and call again")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = parser.add_subparsers(dest="word", required=True)
    run = words.add_parser("run", help="on the machine with the GPUs")
    run.add_argument("site", type=Path, help="SGLang and what it imports")
    rehearse = words.add_parser("rehearse", help="the control flow, on miniature ranks or vLLM on CPUs")
    for parts in (run, rehearse, words.add_parser("report", help="what is measured so far")):
        parts.add_argument("work", type=Path)
    for parts, sizes, starts, budget in ((run, [8, 4], 3, 540.0), (rehearse, [2], 1, 240.0)):
        parts.add_argument("--tp", type=int, nargs="+", default=sizes)
        parts.add_argument("--arms", nargs="+", default=[], metavar="NAME", help="these alone")
        parts.add_argument("--starts", type=int, default=starts, help="rounds: what intervals are over")
        parts.add_argument("--budget", type=float, default=budget, help="seconds of this call")
        parts.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if "OUT" in os.environ else None)
        parts.add_argument("--resume", type=Path, help="an earlier call's OUT, where WORK was lost with its machine")
    run.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["70b", "moe200b"])
    run.add_argument("--from", dest="source", type=Path, default=Path(".gpu"), help="where the bundle's parts lie")
    rehearse.add_argument("--vllm", type=Path, metavar="PYTHON", help="the interpreter that has vLLM for CPUs")
    args = parser.parse_args()
    if args.word == "run" and args.out is None:
        parser.error("--out is needed where $OUT is not set")
    return args


if __name__ == "__main__":
    main()
