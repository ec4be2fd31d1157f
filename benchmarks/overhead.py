"""What the full recipe costs a cycle of a real server: probes in and out at random from cycle to cycle.

    python benchmarks/overhead.py --out DIR [--engine vllm] [--seconds 100] [--recipe FILE] -- CMD...
    python benchmarks/overhead.py --pool DIR DIR    what earlier runs say, each and together (inverse variances)

"Out" is the original code object with the cycle point alone. The server is started once under a link; requests of one
client follow each other. Prints the trimmed mean difference with its 95 % interval, records per cycle and the load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict
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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pool", type=Path, nargs="+", default=[])
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--recipe", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=100.0, help="how long requests run with probes in and out")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    if args.pool:
        return pool(args.pool)
    if args.out is None or not args.command:
        parser.error("--out DIR and a command, or --pool DIR...")
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
    kept = {"command": args.command, **result, "requests": [asdict(request) for request in requests]}
    (args.out / "overhead.json").write_text(json.dumps(kept, indent=1))
    return print(json.dumps(result, indent=1))


def pool(folders: list[Path]) -> None:
    """Reads the rings of earlier runs again; prints each one's percent of a cycle and what they say together."""
    found = []
    for folder in folders:
        [link] = (folder / "links").iterdir()
        kept = json.loads((folder / "overhead.json").read_text()).get("requests", [])
        requests = [Request(**request) for request in kept]
        percent = summary(load_link(link, requests), requests)["percent"]
        found.append(percent)
        print(f"{folder}: {percent['point']:.3f} % [{percent['low']:.3f}, {percent['high']:.3f}]")
    weights = [(one["high"] - one["low"]) ** -2 for one in found]
    point = sum(w * one["point"] for w, one in zip(weights, found, strict=True)) / sum(weights)
    half = sum(weights) ** -0.5 / 2
    print(f"together: {point:.3f} % [{point - half:.3f}, {point + half:.3f}]")


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
