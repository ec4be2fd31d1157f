"""Cycle time of one server under specmeter armed, viztracer, py-spy record and cProfile, against no tool.

    pip install --target TOOLS viztracer py-spy
    python benchmarks/profilers.py --out DIR --tools TOOLS [--starts 3] [--only none,specmeter] -- PYTHON -m MODULE ARGS

Starts are interleaved: each round starts every tool once in a seeded random order, and each start is one unit. A
cycle's time is taken outside, from the gaps between streamed pieces of greedy answers (each piece is one cycle's
tokens): the median over all requests of a start. Printed is each tool's ratio to no tool in the same round, with a 95 %
interval over rounds (t on the logarithm); with fewer than three rounds there is none. viztracer and cProfile follow
spawned children (cProfile by a sitecustomize of its own), py-spy by --subprocesses at its default 100 samples a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from engine_probes import PROMPTS, wait_for_model

from specmeter.control import launch_env
from specmeter.control.prepare import prepare_link
from specmeter.engines import engine_named
from specmeter.engines.process import ServerProcess, free_port

TOOLS = ("none", "specmeter", "viztracer", "py-spy", "cprofile")
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
CPROFILE = """
import atexit, cProfile, os
profile = cProfile.Profile()
profile.enable()
atexit.register(lambda: profile.dump_stats(os.path.join(os.environ["CPROFILE_OUT"], f"{os.getpid()}.prof")))
"""


def started_with(
    tool: str, command: Sequence[str], tools: Path, out: Path, engine: str
) -> tuple[list[str], Mapping[str, str]]:
    """The command and environment of one start under ``tool``; files go below ``out``."""
    env = dict(os.environ)
    path = [str(tools), env.get("PYTHONPATH", "")]
    if tool == "specmeter":
        base = out / "links"
        base.mkdir(mode=0o700)
        return list(command), launch_env(prepare_link(command, engine=engine, base=base, armed=True))
    if tool == "viztracer":
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        return [command[0], "-m", "viztracer", "-o", str(out / "trace.json"), "--", *command[1:]], env
    if tool == "py-spy":
        record = ["record", "--subprocesses", "-o", str(out / "flame.svg"), "--"]
        return [str(tools / "bin" / "py-spy"), *record, *command], env
    if tool == "cprofile":
        site = out / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(CPROFILE)
        env |= {"CPROFILE_OUT": str(out), "PYTHONPATH": os.pathsep.join(filter(None, [str(site), path[1]]))}
    return list(command), env


def gaps_ms(url: str, model: str, prompt: str, tokens: int) -> list[float]:
    """The times between the streamed pieces of one greedy answer, the first piece left out."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    stamps = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                stamps.append(time.perf_counter())
    return [(after - before) * 1e3 for before, after in itertools.pairwise(stamps[1:])]


def one_start(tool: str, args: argparse.Namespace, number: int) -> float:
    """The median cycle of one start, ms."""
    out = args.out.resolve() / f"{number:02}-{tool}"
    out.mkdir(parents=True, mode=0o700)
    engine, port = engine_named(args.engine), free_port()
    command, env = started_with(
        tool, engine.with_port(tuple(args.command), port), args.tools.resolve(), out, args.engine
    )
    process = ServerProcess(tuple(command), env, out / "server.log")
    try:
        url = f"http://127.0.0.1:{port}"
        model = wait_for_model(process, url, 300.0)
        for prompt in PROMPTS[:2]:
            gaps_ms(url, model, prompt, 32)
        gaps = [gap for prompt in PROMPTS[: args.prompts] for gap in gaps_ms(url, model, prompt, args.max_tokens)]
    finally:
        process.stop()
    return statistics.median(gaps)


def compare(found: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Each tool's cycle and its ratio to no tool of the same round."""
    rows = []
    for tool, cycles in found.items():
        logs = [math.log(mine / none) for mine, none in zip(cycles, found["none"], strict=False)]
        row: dict[str, Any] = {
            "tool": tool,
            "cycle_ms": [round(cycle, 3) for cycle in cycles],
            "low": None,
            "high": None,
        }
        row["ratio"] = math.exp(statistics.mean(logs)) if logs else None
        if len(logs) >= 3 and tool != "none":
            half = T_95.get(len(logs) - 1, 1.96) * statistics.stdev(logs) / math.sqrt(len(logs))
            row |= {"low": row["ratio"] * math.exp(-half), "high": row["ratio"] * math.exp(half)}
        rows.append(row)
    return rows


def main() -> None:
    """Start, ask, stop, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--only", default=",".join(TOOLS))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    only = [tool for tool in TOOLS if tool in args.only.split(",") or tool == "none"]
    rng, found, number = random.Random(7), {tool: [] for tool in only}, 0  # type: ignore[var-annotated]
    for _ in range(args.starts):
        for tool in rng.sample(only, len(only)):
            found[tool].append(one_start(tool, args, number))
            number += 1
            print(f"{tool}: {found[tool][-1]:.2f} ms a cycle", flush=True)
    rows = compare(found)
    machine = f"{os.cpu_count()} cores {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    (args.out / "profilers.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    for row in rows:
        spread = "" if row["low"] is None else f"  [{row['low']:.3f}, {row['high']:.3f}]"
        print(f"{row['tool']:10} {statistics.mean(row['cycle_ms']):8.2f} ms  x {row['ratio']:.3f}{spread}")


if __name__ == "__main__":
    main()
