"""Documents and traces with known numbers, for the tests of the reports."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.analysis.compare import ArmFacts, analyse_compare
from specmeter.analysis.profile import analyse
from specmeter.analysis.sweep import Arm, analyse_sweep
from specmeter.runtime import layout
from specmeter.trace import Request, Trace, load_rings
from specmeter.trace.rundir import RunWriter
from specmeter.trace.synthetic import make_plan, make_records, write_ring
from specmeter.trace.tables import write_table
from specmeter.tune.journal import Journal

MS = 1_000_000
PLAN = make_plan(
    [
        ("cycle", "cycle", "none"),
        ("verify.forward", "leaf", "none"),
        ("draft.forward", "leaf", "loop"),
        ("accept.sample", "leaf", "none"),
        ("wait.sync", "wait", "none"),
    ],
    ["cycle.drafted", "cycle.accepted", "cycle.steps"],
)
SPAN, VALUE = layout.KIND_HOST_SPAN, layout.KIND_VALUE


def one_cycle(start: int, length: int, drafted: int, accepted: int) -> list[tuple[int, ...]]:
    """60 % verify, 10 % a draft step after the first, 10 % accept, 5 % waiting, 10 % and more glue."""
    rows: list[tuple[int, ...]] = [(start, start + length * 60 // 100, 0, 2, SPAN, 0, 0)]
    at = start + length * 60 // 100
    for _ in range(drafted - 1):
        rows.append((at, at + length // 10, 0, 3, SPAN, 0, 0))
        at += length // 10
    rows.append((at, at + length // 10, 0, 4, SPAN, 0, 0))
    at += length // 10
    rows.append((at, at + length // 20, 0, 5, SPAN, 0, 0))
    end = start + length * 95 // 100
    rows.append((start, end, 0, 1, SPAN, 0, 0))
    return rows + [(v, end, 0, 6 + i, VALUE, 0, 0) for i, v in enumerate((drafted, accepted, drafted))]


def record(
    folder: Path, cycles: int = 30, ranks: tuple[int, ...] = (-1,), name: str = "", prompts: int = 4
) -> tuple[Trace, list[Request]]:
    """Each prompt once plain (10 ms a step) and once with 2 drafts (16 ms a cycle; 1 accepted on average)."""
    rows: list[tuple[int, ...]] = []
    requests: list[Request] = []
    at = 1000 * MS
    for prompt in range(prompts):
        for setting, length, drafted in (("baseline", 10 * MS, 0), ("k2", 16 * MS, 2)):
            send, tokens = at, 0
            at += MS
            first = at
            for i in range(cycles):
                accepted = (i + prompt) % 3 if drafted else 0
                tokens += accepted + 1
                rows += one_cycle(at, length, drafted, accepted)
                at += length
            kind = ("chat", "code")[prompt % 2]
            requests.append(
                Request(
                    f"r{len(requests)}",
                    f"{name}{kind}-{prompt}",
                    setting,
                    prompt,
                    send,
                    first,
                    at - 1,
                    20 * (prompt + 1),
                    tokens + 1,
                )
            )
            at += 50 * MS
    folder.mkdir(exist_ok=True)
    rings = [
        write_ring(folder / f"{7 + i}-1.ring", make_records(rows), pid=7 + i, rank=rank)  # type: ignore[arg-type]
        for i, rank in enumerate(ranks)
    ]
    return load_rings(rings, PLAN, requests), requests


def profile(folder: Path, **how: Any) -> dict[str, Any]:
    """A profile document of ``record``."""
    trace, requests = record(folder, **how)
    return analyse(trace, requests)


def sweep(folder: Path) -> dict[str, Any]:
    """A sweep document: baseline and k2 with a trace."""
    trace, requests = record(folder)
    arms = [
        Arm("baseline", {"steps": 0}, requests[0::2], trace),
        Arm("k2", {"steps": 2, "topk": 1}, requests[1::2], trace),
    ]
    return analyse_sweep(arms)


def save(
    folder: Path, trace: Trace, requests: list[Request], document: dict[str, Any], command: tuple[str, ...] = ("x",)
) -> RunWriter:
    """A finished run directory."""
    writer = RunWriter.create(folder, command)
    writer.write_plan(PLAN)
    writer.write_trace(trace)
    writer.write_requests(requests)
    writer.write_analysis(document)
    writer.finish()
    return writer


def check_result() -> dict[str, Any]:
    """The result of a check that found a wrong wiring."""
    return {
        "target": "/m/target", "draft": "/m/draft", "target_layers": 61,
        "head": {"kind": "eagle3", "states": 3, "hidden_size": 64},
        "trained": {"states": [3, 31, 59], "certain": True, "reason": "its config says so"},
        "feeds": [{"engine": "sglang", "engine_version": "0.5", "states": [0, 31, 59], "refusal": None,
                   "key_read": "ids", "reader": "runner 2"}],
        "findings": [{"id": "fed-embedding", "severity": "error", "what": "The head is fed the embedding output.",
                      "cause": "an id of 0", "cure": "write 3", "where": "config.json"}],
        "errors": 1,
    }  # fmt: skip


def compared() -> dict[str, Any]:
    """Three starts a side: 100 tok/s against 110, a percent apart from start to start."""
    requests = []
    for start in range(6):
        arm, rate = (("baseline", 100.0), ("tuned", 110.0))[start % 2]
        for block in range(3):
            for prompt in range(2):
                end = 10**9 + round(100 / (rate * (1 + 0.01 * (start // 2))) * 1e9)
                requests.append(
                    Request(f"{start}-{block}-{prompt}", f"p{prompt}", arm, block, 0, 10**9, end, 5, 101, start=start)
                )
    return analyse_compare([ArmFacts("baseline", {}), ArmFacts("tuned", {})], requests, 0.01)


def tuned(folder: Path, proof: dict[str, Any]) -> Path:
    """A tune of three trials: one good, one that did not start, one raced out; its journal in order."""
    writer = RunWriter.create(folder, ["specmeter", "tune"])
    trials: list[dict[str, Any]] = [
        {"setting": {"label": "k=2"}, "flags": {}, "logs": [math.log(50)] * 3, "cause": "", "stopped": False},
        {"setting": {"label": "k=6"}, "flags": {}, "logs": [], "cause": "out of memory", "stopped": False},
        {
            "setting": {"label": "k=1"},
            "flags": {"--x": "<b>"},
            "logs": [math.log(40)] * 2,
            "cause": "",
            "stopped": True,
        },
    ]
    with Journal(folder / "journal.sqlite", {}) as journal:
        for i, trial in enumerate(trials):
            journal.add("trial", {**trial, "env": {}, "level": 1, "start": i, "seconds": 1.0, "accept_length": None})
    row = {"starts": 1, "predicted_tokens_per_s": None, "raced_out": False}
    level = {
        "concurrency": 1,
        "winner": {"label": "k=2"},
        "starting_point": "k=2",
        "search": {
            "starts": 3, "server_s": 3.0, "ended_by": "the budget", "not_run": [],
            "tried": [
                {**row, "label": "k=2", "tokens_per_s": 50.0},
                {**row, "label": "k=1", "tokens_per_s": 40.0},
            ],
            "infeasible": [{"label": "k=6", "cause": "out of memory"}],
        },
        "proof": proof,
        "against_start": None,
        "verdict": {"word": "faster", "sentence": "k=2 is best: +10.0 % against the baseline."},
    }  # fmt: skip
    writer.write_analysis(
        {
            "schema": "specmeter/analysis/1", "kind": "tune", "levels": [level], "verdict": level["verdict"],
            "space": {"skipped": [{"name": "NCCL", "reason": "no collectives"}]}, "command_line": "serve --k 2",
        }
    )  # fmt: skip
    writer.finish()
    return writer.path


def big_run(folder: Path, count: int, ranks: int) -> Path:
    """``ranks`` of ``count`` cycles each with five spans a cycle, as the tables of a run would hold them."""
    trace, requests = record(folder / "rings", ranks=tuple(range(ranks)))
    writer = RunWriter.create(folder / "run", ["specmeter", "profile"])
    writer.write_plan(PLAN)
    writer.write_analysis(analyse(trace, requests))
    all_ = count * ranks
    rng = np.random.default_rng(0)
    dur = rng.gamma(400, 40_000, all_).astype(np.int64)
    t0 = np.concatenate([np.cumsum(part) - part for part in dur.reshape(ranks, count)]) + 10**12
    rank = np.repeat(np.arange(ranks, dtype=np.int32), count)
    cycle = np.tile(np.arange(count), ranks)
    same = {"host": np.full(all_, "box"), "rank": rank, "cycle": cycle, "t0_ns": t0, "dur_ns": dur}
    ones = np.ones(all_, np.int32)
    prompts = np.array([f"{('chat', 'code')[i % 2]}-{i % 7}" for i in range(14)])
    write_table(
        writer.path, "cycles",
        {**same, "kind": np.full(all_, "decode"), "batch": ones, "steps": 2 * ones, "drafted": 2 * ones,
         "accepted": rng.integers(0, 3, all_).astype(np.int32), "sampled": rng.integers(1, 4, all_).astype(np.int32),
         "setting": np.full(all_, "k2"), "block": 0 * ones, "prompt_id": prompts[cycle % 14],
         "dropped": np.full(all_, ""), "probed": ones.astype(np.uint8)},
    )  # fmt: skip
    shares = np.array([0.6, 0.2, 0.1, 0.05, 0.05])
    points = np.array(["verify.forward", "draft.forward", "accept.sample", "wait.sync", "cycle"])
    own = (np.repeat(dur, 5).reshape(-1, 5) * shares).astype(np.int64)
    write_table(
        writer.path, "spans",
        {"host": np.full(5 * all_, "box"), "pid": np.repeat(rank, 5).astype(np.int64), "rank": np.repeat(rank, 5),
         "cycle": np.repeat(cycle, 5), "point": np.tile(points, all_), "step": np.zeros(5 * all_, np.int32),
         "clock": np.full(5 * all_, "host"),
         "t0_ns": (np.repeat(t0, 5).reshape(-1, 5) + np.cumsum(own, 1) - own).ravel(), "dur_ns": own.ravel(),
         "self_ns": own.ravel(), "inside": np.ones(5 * all_, bool)},
    )  # fmt: skip
    writer.finish()
    return writer.path


DAMAGE: tuple[Any, ...] = (None, "x", -1, {}, [], 1e308, float("nan"), "(gone)")


def damaged(document: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The document with one place at a time removed or of another type or size: (place and what is there, copy)."""
    for path in _places(document):
        for value in DAMAGE:
            broken = copy.deepcopy(document)
            inner: Any = broken
            for key in path[:-1]:
                inner = inner[key]
            if value == "(gone)":
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield (*path, value), broken


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from _places(inner, (*at, key))
