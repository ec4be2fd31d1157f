"""What huge pages under its weights gain the embedded engine: decoding speed, start-up and memory, with and without.

    python benchmarks/huge_pages.py --starts 5

A start is a fresh process that loads the engine once and decodes every prompt plainly and with k drafts, greedily.
Starts with and without alternate, and which comes first is drawn for each pair. A rate is tokens per second without the
prompt's share. Printed as JSON: medians over all prompts and starts, and the ratio over the same prompts of a pair of
starts, each with a 95 % interval (binomial order statistics); seconds of Engine.load and of what huge pages take of it;
resident memory; the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from questions import FORM, QUESTIONS

SIDES = {"small": False, "huge": True}


def main() -> None:
    """All starts, and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="of each side")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--one", choices=tuple(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("FOUND " + json.dumps(one_start(options)))
        return
    draw = random.Random(options.seed)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.starts):
        for side in draw.sample(list(SIDES), len(SIDES)):
            found[side].append(child(side))
            print(f"start {number + 1} of {options.starts}, {side}: {found[side][-1]['said']}", file=sys.stderr)
    print(json.dumps(report(found, options.steps), indent=1))


def child(side: str) -> dict[str, Any]:
    """One start in a process of its own; its words and exit 1 if it fails."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", side]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    sys.exit(f"a start failed ({done.returncode}):\n{done.stderr[-3000:]}")


def one_start(options: argparse.Namespace) -> dict[str, Any]:
    """Rates by number of steps, one a prompt, and what loading took."""
    import torch
    from tokenizers import Tokenizer

    import specmeter.eagle
    from specmeter.eagle import huge_pages
    from specmeter.eagle.engine import Engine, Sampling, SpecSettings
    from specmeter.eagle.model_store import ensure_model

    spent, collapse = [0.0], huge_pages.collapse

    def timed(before: dict[int, int]) -> huge_pages.HugePages:
        start = time.perf_counter()
        found = collapse(before)
        spent[0] = time.perf_counter() - start
        return found

    huge_pages.collapse = timed
    model = ensure_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(FORM.format(q), add_special_tokens=False).ids for q in QUESTIONS[: options.prompts]]
    head = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"
    start = time.perf_counter()
    engine = Engine.load(model, head, draft_int8=True, huge_pages=SIDES[options.one])
    load = time.perf_counter() - start
    sizes = memory()
    rates: dict[str, list[float]] = {str(steps): [] for steps in options.steps}
    sampling = Sampling(max_tokens=options.tokens, ignore_eos=True)
    list(engine.generate(prompts[0], Sampling(max_tokens=16, ignore_eos=True), SpecSettings(max(options.steps))))
    for prompt in prompts:
        for steps in options.steps:
            cycles = engine.generate(prompt, sampling, SpecSettings(steps))
            next(cycles)
            start = time.perf_counter()
            gained = sum(len(cycle.token_ids) for cycle in cycles)
            rates[str(steps)].append(gained / (time.perf_counter() - start))
    said = {"said": str(engine.huge_pages), "growth_mb": engine.huge_pages.growth / 1e6, "torch": torch.__version__}
    return {**said, "rates": rates, "load_s": load, "collapse_s": spent[0], "weights": engine.layout, **sizes}


def memory() -> dict[str, float]:
    """Resident, proportional and huge memory of this process in MB, as the kernel counts it."""
    text = Path("/proc/self/smaps_rollup").read_text()
    names = {"rss_mb": "Rss", "pss_mb": "Pss", "anon_huge_mb": "AnonHugePages"}
    return {key: int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.M)[0]) * 1024 / 1e6 for key, name in names.items()}


def report(found: dict[str, list[dict[str, Any]]], steps: list[int]) -> dict[str, Any]:
    """Medians and intervals by side, ratios over the same prompts of a pair of starts, and the machine."""
    rates = {
        side: {k: [rate for start in starts for rate in start["rates"][str(k)]] for k in steps}
        for side, starts in found.items()
    }
    ratios = {
        k: interval([big / small for small, big in zip(rates["small"][k], rates["huge"][k], strict=True)])
        for k in steps
    }
    kept = ("load_s", "collapse_s", "rss_mb", "pss_mb", "anon_huge_mb", "growth_mb")
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "tokens_per_s": {side: {f"k={k}": interval(v) for k, v in by.items()} for side, by in rates.items()},
        "huge_over_small": {f"k={k}": value for k, value in ratios.items()},
        **{name: {side: interval([s[name] for s in starts]) for side, starts in found.items()} for name in kept},
        "said": sorted({start["said"] for start in found["huge"]}),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": platform.processor() or platform.machine(),
            "kernel": platform.release(),
            "transparent_hugepage": mode.read_text().strip() if mode.exists() else None,
            "torch": found["huge"][0]["torch"],
            "weights": sorted({start["weights"] for starts in found.values() for start in starts}),
            "load_average": os.getloadavg(),
            "when": time.strftime("%Y-%m-%d %H:%M"),
        },
    }


def interval(values: list[float]) -> list[float]:
    """[low, median, high]: order statistics whose coverage of the median is at least 95 % (normal approximation).

    With fewer than six values these are the least and the largest, which cover less.
    """
    ordered, n = sorted(values), len(values)
    reach, middle = round(0.98 * n**0.5), (n - 1) / 2
    low, high = max(0, int(middle - reach)), min(n - 1, int(middle + reach + 1))
    return [round(value, 4) for value in (ordered[low], statistics.median(ordered), ordered[high])]


if __name__ == "__main__":
    main()
