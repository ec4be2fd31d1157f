"""The tables that eight_report.py prints of one server: arms, each rank's phases, skew, collectives, experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# The start whose ranks and collectives are printed; those of all starts are in eight.json.
SHOWN = ("default.1", "tuned.1", "nccl.1", "draft.1")


def show(body: str, document: Mapping[str, Any]) -> None:
    """Print them."""
    print(f"\n== {body}")
    for line in lines(document):
        print(line)


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """All tables of one server."""
    for row in document["arms"]:
        rate = "-" if row["tok_s"] is None else f"{row['tok_s']:.1f} tok/s"
        yield f"{row['arm']:10} {rate:>14} over {row['starts']} starts" + "".join(_ratios(row))
    yield from _chosen(document)
    for name, run in document["runs"].items():
        if name not in SHOWN:
            continue
        yield f"-- {name}" + (f" ({run['reason']})" if run.get("reason") else "")
        yield from _ranks(run)
        yield from _skew(run)
        yield from _collectives(run)


def _ratios(row: Mapping[str, Any]) -> Iterator[str]:
    for other in ("plain", "default", "tuned"):
        ratio = row.get(f"over_{other}")
        if ratio:
            low, high = ratio["low"], ratio["high"]
            ends = "no interval" if low is None or high is None else f"{low:.3f}, {high:.3f}"
            yield f", x {ratio['point']:.3f} [{ends}] of {other} by {ratio['unit']}"


def _chosen(document: Mapping[str, Any]) -> Iterator[str]:
    steps, experts, text = document.get("steps"), document.get("experts"), document.get("text_ids")
    if steps:
        rates = ", ".join(f"k={k} {rate:.1f}" for k, rate in steps["tok_s"].items())
        yield f"tuned: {steps['tuned']} steps, {steps['why']}" + (f" (tok/s {rates})" if rates else "")
    if text:
        yield f"text of the drafts: {text['distinct']} distinct ids of {text['of']}"
    if experts:
        told = ", ".join(f"{n}: {float(count):.1f}" for n, count in experts.items())
        yield f"distinct experts a layer by neighbouring tokens: {told}"


def _ranks(run: Mapping[str, Any]) -> Iterator[str]:
    rows = run.get("ranks") or []
    if not rows:
        told = ", ".join(f"{row['name']} {row['ms']:.3f}" for row in run.get("phases") or [])
        yield f"ms a cycle, host: {told}" if told else "no phases"
        return
    phases = list(dict.fromkeys(phase for row in rows for phase in row["phases_ms"]))
    yield "ms a cycle, host".ljust(18) + "".join(f"{name:>10}" for name in ("cycle", *phases, "own"))
    for row in rows:
        cells = (row["cycle_ms"], *(row["phases_ms"].get(phase, 0.0) for phase in phases), row["own_ms"])
        yield f"{row['host'][:10]} rank {row['rank']}".ljust(18) + "".join(f"{cell:>10.3f}" for cell in cells)
    late = run.get("straggler")
    yield f"straggler: rank {late['rank']}" if late else "straggler: none"


def _skew(run: Mapping[str, Any]) -> Iterator[str]:
    for row in (run.get("rank_skew") or {}).get("arrivals") or []:
        most = max(range(len(row["last_percent"])), key=lambda i: row["last_percent"][i])
        yield (
            f"{row['name']}: {row['calls']:.1f} a cycle, ranks {row['skew_p50_ms']:.3f} ms apart (95 %: "
            f"{row['skew_p95_ms']:.3f}), transfer {row['transfer_ms']:.3f} ms, waiting "
            f"{row['waiting_ms']:.3f} ms; last most often: number {most} ({row['last_percent'][most]:.0f} %)"
        )


def _collectives(run: Mapping[str, Any]) -> Iterator[str]:
    found = run.get("collectives") or {}
    yield from found.get("sentences") or []
    for row in found.get("kinds") or []:
        size = "size not told" if row["bytes"] is None else f"{row['bytes']:.0f} bytes"
        waiting = "" if row["waiting_us"] is None else f", {row['waiting_us']:.1f} of it waiting"
        yield (
            f"  {row['phase']:8} {row['operation']} by {row['backend']}, {size}: {row['count']:.1f} a cycle, "
            f"{row['us']:.1f} us{waiting}"
        )
