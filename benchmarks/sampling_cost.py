"""What always-on sampling costs the embedded engine: the whole server's time, by block, in one process.

    python benchmarks/sampling_cost.py --out DIR [--budget 1] [--blocks 24] [--tokens 96] [--model DIR --draft DIR]

The engine decodes the same prompt greedily again and again, so that every request does the same work. Each block holds,
in random order, one request with the original code (disarmed), one with the cycle point alone, one sampled at the
share that the budget allows, and one with every probe in every cycle. A request's time over its cycles is compared with
the disarmed one of its block: ratios are means over blocks with Student's intervals on their logarithms. Before, cycles
with probes in and out at random give the cost of a sampled cycle and the time that a change of code takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from specmeter.analysis.sampling import Share
from specmeter.analysis.stats import paired_ratio
from specmeter.bench.budget import share_for
from specmeter.commands.model_folders import embedded_models
from specmeter.control import Link, Sampling, arm, disarm, launch_env, mix, wait_for_processes
from specmeter.control.prepare import prepare_link
from specmeter.trace import load_link

STATES = ("disarmed", "cycle point", "sampled", "every cycle")
PROMPT = "Explain in a few sentences how a bicycle stays upright while it is ridden."
STEPS = 3
SEED = 20251130


def main() -> None:
    """Parent or child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model", type=Path, help="a Llama-family directory (default: the one that profile uses)")
    parser.add_argument("--draft", type=Path, help="an EAGLE-3 head (default: the packaged one)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        return child(args)
    args.out.mkdir(parents=True, exist_ok=True)
    result = measured(args)
    (args.out / "sampling_cost.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return None


def child(args: argparse.Namespace) -> None:
    """Decode once for each line of standard input; answer with cycles and seconds, the prompt's own left out."""
    from specmeter.eagle.engine import Engine, SpecSettings
    from specmeter.eagle.engine import Sampling as Drawing
    from specmeter.eagle.tokenizer import Tokenizer

    engine = Engine.load(args.model, args.draft, threads=args.threads, max_context=1024, device=args.device)
    ids, how = Tokenizer(args.model).encode(PROMPT), Drawing(max_tokens=args.tokens, ignore_eos=True)
    print("ready", flush=True)
    for _line in sys.stdin:
        decoding = engine.generate(ids, how, SpecSettings(STEPS))
        next(decoding)
        t0 = time.perf_counter()
        cycles = sum(1 for _cycle in decoding)
        print(json.dumps({"cycles": cycles, "seconds": time.perf_counter() - t0}), flush=True)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Start the child under a link, measure the share, then the blocks."""
    (args.out / "links").mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--child"]
    for name, value in asked(args).items():
        command += [f"--{name}", str(value)]
    link = prepare_link(command, engine="specmeter", base=args.out / "links", capacity=1 << 20)
    process = subprocess.Popen(command, env=launch_env(link), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        wait_for_processes(link)
        ask(process)
        share, change_us = window(process, link, args.budget)
        rows = blocks(process, link, share, args.blocks)
    finally:
        process.kill()
        process.wait()
    return summary(rows, share, change_us, args)


def window(process: subprocess.Popen[str], link: Link, budget: float) -> tuple[Share, float]:
    """A quarter of the cycles probed, for sixteen requests."""
    arm(link, sampling=Sampling(SEED, 250))
    for _ in range(16):
        ask(process)
    reports = [found.report for found in mix(link, SEED, 250).done]  # asking again has them written
    rank = load_link(link.path).main
    disarm(link)
    return share_for(budget, rank, (), reports), rank.change_us


def blocks(process: subprocess.Popen[str], link: Link, share: Share, count: int) -> list[dict[str, float]]:
    """Milliseconds a cycle of each state, one row a block."""
    rng, rows = random.Random(SEED), []
    for _ in range(count):
        order = list(STATES)
        rng.shuffle(order)
        row = {}
        for state in order:
            put(link, state, share)
            found = ask(process)
            row[state] = 1e3 * found["seconds"] / found["cycles"]
        rows.append(row)
    disarm(link)
    return rows


def put(link: Link, state: str, share: Share) -> None:
    """Bring the process into a state."""
    if state == "disarmed":
        disarm(link)
    elif state == "every cycle":
        arm(link)
    else:
        arm(link, sampling=Sampling(SEED, 0 if state == "cycle point" else share.permille))


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    """One request."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    found: dict[str, float] = json.loads(process.stdout.readline())
    return found


def summary(rows: list[dict[str, float]], share: Share, change_us: float, args: argparse.Namespace) -> dict[str, Any]:
    """Ratios to the original code, percent more, with intervals over blocks."""
    plain = [row["disarmed"] for row in rows]
    more = {}
    for state in STATES[1:]:
        ratio = paired_ratio([row[state] for row in rows], plain, "block")
        more[state] = {end: round(100 * (getattr(ratio, end) - 1), 3) for end in ("low", "point", "high")}
    return {
        "more_than_disarmed_percent": more,
        "cycle_ms_disarmed_median": round(sorted(plain)[len(plain) // 2], 3),
        "share": share.as_json(),
        "change_us": round(change_us, 1),
        "blocks": len(rows),
        "tokens": args.tokens,
        "threads": args.threads,
        "device": args.device,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """What the child is to run: the model and head named, else those that `specmeter profile` uses."""
    model, draft = embedded_models(args.model, args.draft)
    return {"model": model, "draft": draft, "threads": args.threads, "tokens": args.tokens, "device": args.device}


if __name__ == "__main__":
    main()
