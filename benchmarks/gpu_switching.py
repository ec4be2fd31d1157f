"""Step counts switched inside one start of SGLang's adaptive runtime, in seeded blocks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gpu_windows as windows
from gpu_client import Answers, Load, Prompt, drive
from gpu_fleet import Server

from specmeter import control
from specmeter.analysis.profile import analyse
from specmeter.analysis.stats import cluster_ratio
from specmeter.trace import load_link

KNOB = "draft_steps"
PER_BLOCK = Load(rounds=1, tokens=160, prompts=6)


def adaptive_flags(work: Path, candidates: Iterable[int]) -> tuple[str, ...]:
    """SGLang builds the graphs of every candidate; it never leaves its warm-up, so its own average changes nothing."""
    config = work / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": list(candidates), "warmup_batches": 1 << 60}}))
    return ("--speculative-adaptive", "--speculative-adaptive-config", str(config))


def sweep_steps(
    server: Server,
    out: Path,
    prompts: Sequence[Prompt],
    candidates: Sequence[int] = range(6),
    blocks: int = 4,
    seed: int = 5,
) -> dict[str, Any]:
    """Every candidate once a block, in an order drawn by seed; the first requests after a switch are left out."""
    link = windows.link_of(server)
    control.arm(link)
    meet(server, prompts)
    order = random.Random(seed)
    found: dict[int, list[Answers]] = {k: [] for k in candidates}
    for block in range(blocks):
        for k in order.sample(list(candidates), len(candidates)):
            switch(server, prompts, k)
            found[k].append(drive(server.url, prompts, PER_BLOCK, f"k{k}-{block}", f"k={k}"))
    states = control.knob_states(link, KNOB)
    control.disarm(link)
    rows = {k: row(link, answers) for k, answers in found.items()}
    told = ", ".join(f"k={k} {r['tok_s']['point']:.0f}" for k, r in rows.items())
    return {"line": f"tok/s: {told}", "rows": rows, "knob": states, "blocks": blocks, "seed": seed}


def meet(server: Server, prompts: Sequence[Prompt]) -> None:
    """Requests by which the engine's thread passes the knob's place. Raises RuntimeError if it is not there."""
    drive(server.url, prompts, Load(1, 32, 1, 2), "meet", "meet")
    until = time.monotonic() + 5
    while True:
        states = control.knob_states(windows.link_of(server), KNOB)
        if any(state["met"] for state in states):
            return
        reasons = [state["reason"] for state in states if state["reason"]]
        if reasons or time.monotonic() > until:
            raise RuntimeError(reasons[0] if reasons else "no process came by the knob's place")
        time.sleep(0.01)


def switch(server: Server, prompts: Sequence[Prompt], steps: int) -> None:
    """Have the engine use ``steps`` from now on; one request is sent over the change. Raises RuntimeError."""
    link = windows.link_of(server)
    control.turn(link, {KNOB: steps})
    drive(server.url, prompts, Load(1, 16, 1, 1), "settle", "settle")
    check(link, steps)


def deep_at(server: Server, prompts: Sequence[Prompt], steps: int, cycles: int) -> dict[str, Any]:
    """A deep window at one step count."""

    def prepare() -> None:
        meet(server, prompts)
        switch(server, prompts, steps)

    return windows.deep(server, prompts, cycles, 1, f"k={steps}", prepare)


def check(link: control.Link, steps: int, limit_s: float = 5.0) -> None:
    """Raise RuntimeError unless the engine has taken ``steps``."""
    until = time.monotonic() + limit_s
    while True:
        states = control.knob_states(link, KNOB)
        reasons = [state["reason"] for state in states if state["reason"]]
        if reasons:
            raise RuntimeError(f"{steps} steps: {reasons[0]}")
        met = [state for state in states if state["met"]]
        if met and all(state["value"] == steps and not state["pending"] for state in met):
            return
        if time.monotonic() > until:
            raise RuntimeError(f"{steps} steps were not taken: {states}")
        time.sleep(0.005)


def row(link: control.Link, blocks: Sequence[Answers]) -> dict[str, Any]:
    """Decode tokens a second, cycle and accept length of one step count, with intervals over its blocks."""
    requests = [request for answers in blocks for request in answers.requests]
    trace = load_link(link.path, requests)
    good = [[r for r in answers.requests if r.decode_rate] for answers in blocks]
    tokens = [sum(r.output_tokens - 1 for r in block) for block in good]
    seconds = [sum((r.end_ns - r.first_ns) / 1e9 for r in block) for block in good]
    document = analyse(trace, requests, None, requests[0].setting)
    return {
        "tok_s": cluster_ratio(tokens, seconds, "block").as_json(),
        "cycle_ms": document["cycle"]["mean_ms"],
        "acceptance": document["acceptance"],
        "phases": document.get("phases"),
        "client": [answers.summary() for answers in blocks],
    }
