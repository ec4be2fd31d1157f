"""Run directories whose every cost is known: a law of phases and an acceptance, written as a real run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.trace.rundir import RunWriter
from specmeter.trace.tables import write_table


@dataclass(frozen=True)
class Law:
    """Milliseconds of each part of a cycle; ``accept`` is c1, c2, ... of the chain.

    Verify of n tokens is ``verify + per_width * n``, with ``knee`` more for every token beyond six. ``ranks`` are the
    shares of failures in which the draft had the right token at place 2, 3, ...; empty: the engine tells no places.
    """

    verify: float = 10.0
    per_width: float = 0.4
    knee: float = 0.0
    step: float = 0.8
    extend: float = 1.0
    per_token: float = 0.1
    output: float = 0.3
    accept: tuple[float, ...] = (0.7, 0.6, 0.5, 0.5, 0.4, 0.4)
    noise: float = 0.02
    ranks: tuple[float, ...] = ()

    def verify_ms(self, width: int) -> float:
        return self.verify + self.per_width * width + self.knee * max(0, width - 6)

    def cycle_ms(self, steps: int) -> float:
        """The expected cycle of a chain; of a plain step for 0."""
        if steps == 0:
            return self.verify_ms(1) + self.output
        once = self.verify_ms(steps + 1) + self.extend + self.per_token * self.tokens(steps)
        return once + self.step * (steps - 1) + self.output

    def tokens(self, steps: int) -> float:
        return 1 + float(np.cumprod(self.accept[:steps]).sum())


def write_run(
    path: Path,
    law: Law,
    steps: Sequence[int],
    prompts: int = 8,
    cycles: int = 40,
    seed: int = 0,
    kind: str = "profile",
    changes: Mapping[str, Any] | None = None,
    command: Sequence[str] = ("specmeter", "profile"),
    batch: int = 1,
    prompt_set: str = "built-in",
    host: str = "h",
    machine: Mapping[str, Any] | None = None,
    own: str = "",
) -> Path:
    """A run of the settings ``steps`` (0: the baseline), ``cycles`` a prompt; ``changes`` go over the analysis.

    ``prompt_set``, ``host`` and ``machine`` are what the run says of where and with what it was made.
    ``own`` names the settings that are not the baseline, as a server's own is called.
    A ``batch`` above 1 verifies so many sequences at once: counts of a cycle are sums over them.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    clock = 0
    for prompt in range(prompts):
        # Prompts differ: what one accepts is a little more or less than the law, and the same under every setting.
        ease = float(rng.normal(0, law.noise))
        for k in steps:
            for at in range(cycles):
                clock = _cycle(rng, law, k, f"p{prompt}", at, cycles, ease, clock, rows, spans, batch)
    for row in (*rows, *spans):
        row["host"] = host
        if own and row.get("setting") not in (None, "baseline"):
            row["setting"] = own
    facts = {} if machine is None else {"machine": dict(machine)}
    settings = [own if own and k else _label(k) for k in steps]
    writer = RunWriter.create(path, command, prompts=prompt_set, seed=0, settings=settings, **facts)
    writer.write_plan({"engine": "specmeter"})
    write_table(writer.path, "cycles", _columns(rows))
    write_table(writer.path, "spans", _columns(spans))
    document = _analysis(rows, [k for k in steps if k], 0 in steps, kind)
    writer.write_analysis({**document, **(changes or {})})
    writer.finish("complete")
    return writer.path


def _label(steps: int) -> str:
    return f"k={steps}" if steps else "baseline"


def _accepted(rng: np.random.Generator, law: Law, k: int, ease: float) -> int:
    accepted = 0
    while accepted < k and rng.random() < min(1.0, law.accept[accepted] + ease):
        accepted += 1
    return accepted


def _place(rng: np.random.Generator, law: Law, accepted: int, k: int) -> int:
    """The draft's place of the token that a failed draft should have been; 0: none of its own, -1: no failure."""
    if not law.ranks or accepted >= k:
        return -1
    return int(rng.choice([*range(2, len(law.ranks) + 2), 0], p=[*law.ranks, 1 - sum(law.ranks)]))


def _cycle(
    rng: np.random.Generator, law: Law, k: int, prompt: str, at: int, of: int, ease: float, clock: int,
    rows: list[dict[str, Any]], spans: list[dict[str, Any]], batch: int,
) -> int:  # fmt: skip
    accepted = sum(_accepted(rng, law, k, ease) for _ in range(batch))
    wobble = 1 + float(rng.normal(0, law.noise))
    parts = [("verify.forward", 0, law.verify_ms((k + 1) * batch) * wobble), ("schedule.output", 0, law.output)]
    if k:
        parts.append(("extend.forward", 0, law.extend + law.per_token * (accepted / batch + 1)))
        parts += [("draft.forward", step, law.step) for step in range(2, k + 1)]
    number, start = len(rows), clock
    for point, step, ms in parts:
        spans.append({
            "host": "h", "pid": 1, "rank": 0, "cycle": number, "point": point, "step": step, "clock": "host",
            "t0_ns": clock, "dur_ns": round(ms * 1e6), "self_ns": round(ms * 1e6), "inside": True,
        })  # fmt: skip
        clock += round(ms * 1e6)
    dropped = "first of a request" if at == 0 else ("last of a request, or idle after it" if at == of - 1 else "")
    rows.append({
        "host": "h", "rank": 0, "cycle": number, "t0_ns": start, "dur_ns": clock - start, "kind": "decode",
        "batch": batch, "steps": k, "drafted": k * batch, "accepted": accepted, "sampled": accepted + batch,
        "setting": _label(k), "block": 0, "prompt_id": prompt, "dropped": dropped, "probed": 1,
        **({"missed_rank": _place(rng, law, accepted, k)} if law.ranks else {}),
    })  # fmt: skip
    return clock


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def _analysis(rows: list[dict[str, Any]], steps: list[int], plain: bool, kind: str) -> dict[str, Any]:
    """The keys of analysis.json that the commands read, made from the rows (``analyse`` needs the rings)."""

    def interval(values: list[float], unit: str) -> dict[str, Any]:
        mean, half = float(np.mean(values)), float(np.std(values)) / 3 + 1e-9
        return {
            "low": mean - half, "point": mean, "high": mean + half, "level": 0.95, "method": "t", "n": 8, "unit": unit,
        }  # fmt: skip

    def of(k: int) -> list[dict[str, Any]]:
        return [row for row in rows if row["steps"] == k]

    base = interval([row["dur_ns"] / 1e6 for row in of(0)], "prompt") if plain else None
    arms = []
    for k in steps:
        cycle = interval([row["dur_ns"] / 1e6 for row in of(k)], "prompt")
        length = interval([row["accepted"] + 1.0 for row in of(k)], "prompt")
        even = cycle["point"] / base["point"] if base else None
        arms.append({
            "setting": _label(k), "accept_length_tokens": length, "cycle_ms": cycle, "break_even_tokens": even,
        })  # fmt: skip
    head = {"schema": "specmeter/analysis/1", "kind": kind, "engine": {"name": "specmeter", "version": "0.1.0"}}
    if kind == "sweep":
        return {**head, "baseline": "baseline" if plain else None, "arms": arms}
    first = arms[0]
    wide = {"low": None, "high": None, "point": first["break_even_tokens"], "level": 0.95, "method": "", "n": 8,
            "unit": "prompt"}  # fmt: skip
    return {
        **head,
        "setting": None,
        "cycle": {"mean_ms": first["cycle_ms"]},
        "acceptance": {"length_tokens": first["accept_length_tokens"], "positions": []},
        "baseline": {"step_ms": base},
        "break_even_tokens": wide if base else None,
    }
