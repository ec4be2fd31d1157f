"""Saved runs with known contents, made by the trace's own writers from synthetic rings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmeter.analysis.profile import analyse, baseline_from_trace
from specmeter.reporters.terminal import render_analysis
from specmeter.runtime import layout
from specmeter.trace import Request, load_rings
from specmeter.trace.rundir import RunWriter
from specmeter.trace.synthetic import make_plan, make_records, write_ring

SPAN, VALUE = layout.KIND_HOST_SPAN, layout.KIND_VALUE
MS = 1_000_000
START = 1000 * MS
EPOCH = 1_790_000_000_000 * MS

PLAN = make_plan(
    [
        ("cycle", "cycle", "none"),
        ("verify.forward", "leaf", "none"),
        ("draft.forward", "leaf", "loop"),
        ("accept.sample", "leaf", "none"),
        ("schedule.step", "span", "none"),
    ],
    ["cycle.drafted", "cycle.accepted", "cycle.steps"],
)
Rows = list[tuple[int, ...]]


def cycle(start: int, length: int, drafted: int, accepted: int, stretch: float = 1.0) -> Rows:
    """One cycle of ``length`` ns: a span with verify (60 %) inside, 10 % a draft step, accept (10 %), 97 % in all."""
    verify = round(length * 0.6 * stretch)
    rows: Rows = [(start + 1, start + verify, 0, 2, SPAN, 0, 0), (start, start + verify + 5, 0, 5, SPAN, 0, 0)]
    at = start + verify + 5
    for _ in range(drafted - 1):
        rows.append((at, at + length // 10, 0, 3, SPAN, 0, 0))
        at += length // 10
    end = start + length * 97 // 100 + verify - round(length * 0.6)
    rows += [(at, at + length // 10, 0, 4, SPAN, 0, 0), (start, end, 0, 1, SPAN, 0, 0)]
    return rows + [(v, end, 0, 6 + i, VALUE, 0, 0) for i, v in enumerate((drafted, accepted, drafted))]


def recording(
    prompts: int = 4, cycles: int = 30, stretch: float = 1.0, start: int = START, seed: int = 0
) -> tuple[Rows, list[Request]]:
    """Each prompt once plain (10 ms a step) and once with 2 drafts (16 ms a cycle, 20 with verify ``stretch``-ed)."""
    rows: Rows = []
    requests: list[Request] = []
    at, number = start, 0
    for prompt in range(prompts):
        for setting, length, drafted in (("baseline", 10 * MS, 0), ("k=2", 16 * MS, 2)):
            send, tokens, first = at, 0, at + MS
            at += MS
            for i in range(cycles):
                accepted = (i + prompt + seed) % 3 if drafted else 0
                tokens += accepted + 1
                grown = length + round(length * 0.6 * (stretch - 1)) + (37 * ((i * 7 + prompt + seed) % 11) * 1000)
                number += 1
                rows += [(*r[:2], number, *r[3:]) for r in cycle(at, length, drafted, accepted, stretch)]
                at += grown
            requests.append(
                Request(f"r{len(requests)}", f"p{prompt}", setting, prompt, send, first, at - 1, 5, tokens + 1)
            )
            at += 50 * MS
    return rows, requests


def save_run(
    out: Path,
    *,
    ranks: Sequence[int] = (-1,),
    extra: Rows | None = None,
    plan: dict[str, Any] | None = None,
    command: Sequence[str] = ("specmeter", "profile"),
    finish: bool = True,
    **how: Any,
) -> Path:
    """A run directory of ``recording`` on every one of ``ranks``; ``extra`` records are in every ring."""
    plan = plan or PLAN
    rows, requests = recording(**how)
    link = out.parent / f"{out.name}-link"
    link.mkdir(parents=True)
    for rank in ranks:
        pid = 100 + rank
        write_ring(
            link / f"{pid}-1.ring",
            make_records([*rows, *(extra or [])]),
            pid=pid,
            rank=rank,
            perf_counter_ns=START,  # type: ignore[arg-type]
        )
    trace = load_rings(sorted(link.glob("*.ring")), plan, requests)
    writer = RunWriter.create(out, command, settings=["k=2", "baseline"])
    writer.write_plan(plan)
    writer.save_rings(link)
    writer.write_trace(trace)
    writer.write_requests(requests)
    document = analyse(trace, requests, baseline_from_trace(trace))
    writer.write_analysis(document)
    writer.write_report(render_analysis(document))
    if finish:
        writer.finish()
    return out
