"""What the server costs: tokens/s over HTTP, whole and streamed, beside the engine called directly.

    python benchmarks/server_overhead.py [--rounds 6] [--tokens 192] [--out DIR/server_overhead.json]

The three ways take turns in one round; the engine of the server and the direct one are two processes of which only one
computes at a time. Prints medians and the range of the rounds, and the time from start to the ready line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

PROMPT = "<|im_start|>user\nWrite a short story about the sea.<|im_end|>\n<|im_start|>assistant\n"
DIRECT = """
import sys, time
from specmeter.commands.serve import packaged_head
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.model_store import ensure_model
from specmeter.eagle.tokenizer import Tokenizer
directory = ensure_model()
engine, ids = Engine.load(directory, packaged_head()), Tokenizer(directory).encode(sys.argv[1])
for line in sys.stdin:
    steps, tokens = map(int, line.split())
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    for _ in engine.generate(ids, sampling, SpecSettings(steps)):
        pass
    print(time.perf_counter() - started, flush=True)
"""


def ask_server(client: httpx.Client, url: str, steps: int, tokens: int, stream: bool) -> float:
    """Seconds of one request."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json={**body, "speculative_num_steps": steps}) as answer:
        for _ in answer.iter_lines():
            pass
    return time.perf_counter() - started


def ask_direct(child: subprocess.Popen[str], steps: int, tokens: int) -> float:
    """Seconds of the same request in the other process."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{steps} {tokens}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    command = [sys.executable, "-m", "specmeter", "serve", "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        subprocess.Popen(
            [sys.executable, "-c", DIRECT, PROMPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as direct,
        httpx.Client(timeout=120) as client,
    ):
        assert server.stdout is not None
        ready = server.stdout.readline()
        ready_s = time.perf_counter() - started
        url = ready.split(" at ")[1].split()[0]
        ask_direct(direct, 2, 8)
        ask_server(client, url, 2, 8, False)
        result: dict[str, object] = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "ready_s": round(ready_s, 2),
        }
        for steps in (0, 2):
            speeds: dict[str, list[float]] = {"direct": [], "whole": [], "stream": []}
            for _ in range(args.rounds):
                speeds["direct"].append(args.tokens / ask_direct(direct, steps, args.tokens))
                speeds["whole"].append(args.tokens / ask_server(client, url, steps, args.tokens, False))
                speeds["stream"].append(args.tokens / ask_server(client, url, steps, args.tokens, True))
            for way, values in speeds.items():
                row = {"median": statistics.median(values), "low": min(values), "high": max(values)}
                result[f"steps_{steps}_{way}_tokens_per_s"] = {name: round(value, 1) for name, value in row.items()}
        server.send_signal(signal.SIGTERM)
        direct.stdin.close()  # type: ignore[union-attr]
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
