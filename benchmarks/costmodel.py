"""How far the cost model's predictions are from measurements, on the embedded engine.

    python benchmarks/costmodel.py --out costmodel --rounds 4
    python benchmarks/costmodel.py --out costmodel --report

A round is one server start: every step count and plain decoding over the same prompts, interleaved in seeded blocks
(``specmeter sweep``). The model then sees only the step counts of --fit, and predicts the others: cycle, accept length
and tokens a second (their ratio), each against what the same start measured (``same start``) and what the other starts
measured (``other start``, the way a user meets it). Errors are in percent, the median over rounds with the range; the
share of errors within the model's own interval is counted. Rounds that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from specmeter.analysis.costmodel_curve import Row, curve
from specmeter.analysis.costmodel_data import Sample, samples_of
from specmeter.analysis.costmodel_evidence import Evidence
from specmeter.trace.rundir import load

QUANTITIES = ("cycle", "accept length", "tok/s")


@dataclass(frozen=True)
class Truth:
    """What one start measured at one step count: ms, tokens, tokens a second."""

    cycle: float
    length: float

    def of(self, quantity: str) -> float:
        return {"cycle": self.cycle, "accept length": self.length, "tok/s": 1000 * self.length / self.cycle}[quantity]


def main() -> None:
    """Measures the rounds that are missing, then prints the table."""
    options = parse()
    if not options.report:
        measure(options)
    rounds = [samples_of([load(path)]) for path in sorted(options.out.glob("round-*"))]
    print(json.dumps({"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
                      "python": platform.python_version(), "rounds": len(rounds)}))  # fmt: skip
    for text in options.fit:
        report([int(k) for k in text.split(",")], rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the rounds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", default="1-6", help="step counts to measure")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--fit", nargs="+", default=["1,3,6", "2,5", "2,6", "6", "3"], help="step counts the model sees"
    )
    parser.add_argument("--report", action="store_true", help="only print what is there")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """One sweep a round, each with its own seed and server start."""
    options.out.mkdir(parents=True, exist_ok=True)
    for number in range(options.rounds):
        path = options.out / f"round-{number}"
        if path.exists():
            continue
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        part = options.out / f"part-{number}-{os.getpid()}"
        words = [
            sys.executable, "-m", "specmeter", "sweep", "--steps", options.steps, "--blocks", "1",
            "--seed", str(number),
            "--requests", str(options.requests), "--max-tokens", str(options.max_tokens), "--out", str(part),
        ]  # fmt: skip
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        part.rename(path)


def truths(samples: tuple[Sample, ...]) -> dict[int, Truth]:
    """What was measured, by step count."""
    found = {}
    for s in samples:
        if s.steps and s.topk == 1:
            kept = s.kept.sum(axis=0)
            found[s.steps] = Truth(float(s.cycle_ms.sum()) / s.cycles, 1 + float(kept[1:].sum() / kept[0]))
    return found


def report(fitted: list[int], rounds: list[tuple[Sample, ...]]) -> None:
    """The table of one choice of step counts that the model sees."""
    same: dict[tuple[int, str], list[float]] = defaultdict(list)
    other: dict[tuple[int, str], list[float]] = defaultdict(list)
    inside: list[bool] = []
    for number, samples in enumerate(rounds):
        known = {s.steps for s in samples if s.topk == 1}
        if not set(fitted) <= known:
            print(f"round {number} has no {sorted(set(fitted) - known)}")
            continue
        seen = tuple(s for s in samples if s.steps == 0 or (s.steps in fitted and s.topk == 1))
        rows = {row.steps: row for row in curve(Evidence(seen, fitted[0]), sorted(known - {0}))}
        for k in sorted(known - {0} - set(fitted)):
            for quantity in QUANTITIES:
                predicted = value(rows[k], quantity)
                for index, at in enumerate(rounds):
                    truth = truths(at)[k].of(quantity)
                    (same if index == number else other)[k, quantity].append(100 * (predicted / truth - 1))
            cycle = truths(samples)[k].cycle
            inside.append(rows[k].cycle_ms.low <= cycle <= rows[k].cycle_ms.high)
    print(f"\nprofiled: {', '.join(map(str, fitted))} steps and the baseline")
    print(f"{'steps':8}" + "".join(f"{q + ', same start':>26}{'other start':>22}" for q in QUANTITIES))
    for k in sorted({k for k, _ in same}):
        edge = "x" if k > max(fitted) else ""
        cells = [f"{spread(same[k, q]):>26}{spread(other[k, q]):>22}" for q in QUANTITIES]
        print(f"{k}{edge:7}" + "".join(cells))
    worst = {q: max((abs(statistics.median(v)) for (_, name), v in same.items() if name == q), default=0.0)
             for q in QUANTITIES}  # fmt: skip
    print("largest median error, same start: " + ", ".join(f"{q} {v:.1f} %" for q, v in worst.items()))
    print(f"measured cycle within the model's interval: {sum(inside)} of {len(inside)}")


def value(row: Row, quantity: str) -> float:
    """The prediction of one quantity."""
    return {"cycle": row.cycle_ms, "accept length": row.tokens, "tok/s": row.tok_s}[quantity].point


def spread(errors: list[float]) -> str:
    """Median and range of errors in percent."""
    if not errors:
        return "-"
    return f"{statistics.median(errors):+.1f} [{min(errors):+.1f}, {max(errors):+.1f}]"


if __name__ == "__main__":
    main()
