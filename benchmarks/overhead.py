"""What the full recipe costs a cycle of a real server: probes in and out at random from cycle to cycle.

    python benchmarks/overhead.py --out DIR [--engine vllm] [--seconds 100] [--recipe FILE] -- CMD...

"Out" is the original code object with the cycle point alone. The server is started once under a link; requests of one
client follow each other. Prints the trimmed mean difference with its 95 % interval, records per cycle and the load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
from engine_probes import ask, wait_for_model
from questions import PROMPTS

from specmeter.analysis.overhead import comparable, drawn_overhead
from specmeter.control import arm, disarm, launch_env, mix
from specmeter.control.prepare import prepare_link
from specmeter.engines import engine_named
from specmeter.engines.process import ServerProcess, free_port
from specmeter.trace import Request, Trace, load_link


def main() -> None:
    """Start, mix, ask, stop, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--recipe", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=100.0, help="how long requests run with probes in and out")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    (args.out / "links").mkdir(parents=True, exist_ok=True)
    engine, port = engine_named(args.engine), free_port()
    recipe = engine_recipe(args.engine)
    link = prepare_link(args.command, engine=recipe, recipe=args.recipe, base=args.out / "links", capacity=1 << 20)
    process = ServerProcess(engine.with_port(tuple(args.command), port), launch_env(link), args.out / "server.log")
    try:
        url = f"http://127.0.0.1:{port}"
        model = wait_for_model(process, url, 300.0)
        ask(url, model, PROMPTS[0], 64, "warm", 0)
        arm(link)
        ask(url, model, PROMPTS[1], 64, "armed", 0)
        mix(link, seed=args.seed)
        requests = run(url, model, args.seconds, args.max_tokens)
        disarm(link)
    finally:
        process.stop()
    result = summary(load_link(link.path, requests), requests)
    (args.out / "overhead.json").write_text(json.dumps({"command": args.command, **result}, indent=1))
    print(json.dumps(result, indent=1))


def engine_recipe(name: str) -> str:
    """The recipe's name of an engine's."""
    return "specmeter" if name == "embedded" else name


def run(url: str, model: str, seconds: float, tokens: int) -> list[Request]:
    """Requests one after the other for ``seconds``."""
    found: list[Request] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        request, _text = ask(url, model, PROMPTS[len(found) % len(PROMPTS)], tokens, f"r{len(found)}", 0)
        found.append(request)
    return found


def summary(trace: Trace, requests: list[Request]) -> dict[str, Any]:
    """The overhead and what it was measured on."""
    rank = trace.main
    found = drawn_overhead(rank, requests)
    usable = comparable(rank, requests)
    inside = usable & (rank.cycles.probed == 1)
    spans = float(rank.calls[inside].sum(axis=1).mean()) if inside.any() else 0.0
    names = {
        name: round(float(rank.calls[inside, i].mean()), 2)
        for i, name in enumerate(trace.index.names)
        if inside.any() and rank.calls[inside, i].any()
    }
    return {
        "percent": found.percent.as_json() if found else None,
        "us": {k: round(1000 * getattr(found.ms, k), 1) for k in ("low", "point", "high")} if found else None,
        "cycles_in": found.cycles_in if found else 0,
        "cycles_out": found.cycles_out if found else 0,
        "mixed_left_out": int(np.count_nonzero(rank.cycles.probed == 2)),
        "cycle_ms_median": round(float(np.median(rank.cycles.dur_ns[usable])) / 1e6, 3) if usable.any() else None,
        "spans_per_cycle": round(spans, 1),
        "spans": names,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


if __name__ == "__main__":
    main()
