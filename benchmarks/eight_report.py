"""What the parts of eight_gpu.py measured so far: arms with intervals, ranks, skew, collectives, the draft at TP 1."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_together import trace_of

import specmeter
from specmeter.analysis.collective_document import collective_facts
from specmeter.analysis.device_document import device_facts
from specmeter.analysis.stats import Interval, paired_ratio, ratio_interval
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.deep import load_deep

_PART = re.compile(r"^(?P<body>.+-tp\d+)\.(?P<arm>[a-z0-9-]+)\.(?P<start>\d+)$")


@dataclass(frozen=True)
class Started:
    """One start of one arm: its folder of results and the decode rate (tok/s, a request) by prompt at batch 1."""

    body: str
    arm: str
    number: int
    folder: Path
    rates: Mapping[str, float]


def report(work: Path) -> dict[str, Any]:
    """Print what there is, and write it to WORK/eight.json and WORK/report/*.txt."""
    started = found_in(work)
    (work / "report").mkdir(exist_ok=True)
    document: dict[str, Any] = {}
    for body in dict.fromkeys(one.body for one in started):
        mine = [one for one in started if one.body == body]
        document[body] = {"arms": arms_of(mine), "runs": {}}
        for one in mine:
            with suppress(FileNotFoundError):
                document[body]["runs"][f"{one.arm}.{one.number}"] = run_of(one, work / "report")
        show(body, document[body])
    document["draft_at_tp1"] = draft_prices(document)
    for line in document["draft_at_tp1"].values():
        print(line["sentence"])
    (work / "eight.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    return document


def found_in(work: Path) -> list[Started]:
    """Every start that has measured its phases at batch 1, done or cut off after that."""
    found = []
    for folder in sorted((work / "results").iterdir()) if (work / "results").is_dir() else []:
        match = _PART.match(folder.name)
        path = folder / "phases1.json"
        if match is not None and path.is_file():
            run = next(iter(folder.glob("run-*")), None)
            rates = rates_of(run) if run is not None else {}
            found.append(Started(match["body"], match["arm"], int(match["start"]), folder, rates))
    return found


def rates_of(run: Path) -> dict[str, float]:
    """Decode rate by prompt of the requests at batch 1 (their names say so), the mean over rounds."""
    table = specmeter.load(run).requests
    rates: dict[str, list[float]] = {}
    columns = ("request_id", "prompt_id", "first_ns", "end_ns", "output_tokens", "error")
    for name, prompt, first, end, tokens, error in zip(*(table[key].tolist() for key in columns), strict=True):
        if not error and name.startswith("phases1-") and tokens > 1 and end > first:
            rates.setdefault(prompt, []).append(1e9 * (tokens - 1) / (end - first))
    return {prompt: float(np.mean(values)) for prompt, values in rates.items()}


def arms_of(started: Sequence[Started]) -> list[dict[str, Any]]:
    """Each arm's rate, and its ratio to plain decoding: over starts where each side has two or more, else over prompts
    of one start, which says nothing about other starts."""
    by_arm: dict[str, list[Started]] = {}
    for one in started:
        by_arm.setdefault(one.arm, []).append(one)
    plain = by_arm.get("plain", [])
    rows = []
    for arm, mine in by_arm.items():
        rates = [geometric(one.rates) for one in mine if one.rates]
        ratio = ratio_of(mine, plain) if arm != "plain" and rates else None
        rows.append(
            {
                "arm": arm,
                "starts": len(rates),
                "tok_s": float(np.mean(rates)) if rates else None,
                "over_plain": ratio.as_json() if ratio else None,
            }
        )
    return rows


def geometric(rates: Mapping[str, float]) -> float:
    """The geometric mean over prompts."""
    return math.exp(float(np.mean(np.log(list(rates.values())))))


def ratio_of(mine: Sequence[Started], plain: Sequence[Started]) -> Interval | None:
    """The ratio of decode rates with its interval and unit; None where there is nothing to compare."""
    ours, theirs = ([one for one in side if one.rates] for side in (mine, plain))
    if len(ours) > 1 and len(theirs) > 1:
        return ratio_interval([geometric(o.rates) for o in ours], [geometric(o.rates) for o in theirs], "server start")
    if not ours or not theirs:
        return None
    shared = sorted(ours[0].rates.keys() & theirs[0].rates.keys())
    if len(shared) < 2:
        return None
    return paired_ratio([ours[0].rates[p] for p in shared], [theirs[0].rates[p] for p in shared], "prompt (one start)")


def run_of(one: Started, out: Path) -> dict[str, Any]:
    """Ranks, skew, collectives and device time of one start's run directory; the whole report as text beside."""
    folder = next(iter(one.folder.glob("run-*")), None)
    if folder is None:
        raise FileNotFoundError(one.folder)
    run = specmeter.load(folder)
    document = dict(run.analysis)
    try:
        trace = trace_of(run)
        windows = load_deep(folder, trace)
        document["collectives"] = collective_facts(trace, windows)
        document["device"] = device_facts(document.get("device"), trace, windows)
    except SpecmeterError as error:
        document["reason"] = str(error)
    (out / f"{one.folder.name}.txt").write_text(render_analysis(document, width=120))
    return {
        key: document.get(key)
        for key in ("cycle", "phases", "ranks", "straggler", "phase_stragglers", "rank_skew", "collectives", "device")
    }


def show(body: str, document: Mapping[str, Any]) -> None:
    """A table of the arms and the first start's ranks and communication."""
    print(f"\n== {body}")
    for row in document["arms"]:
        rate = "-" if row["tok_s"] is None else f"{row['tok_s']:.1f} tok/s"
        ratio, text = row["over_plain"], ""
        if ratio:
            ends = "no interval" if ratio["low"] is None else f"{ratio['low']:.3f}, {ratio['high']:.3f}"
            text = f", x {ratio['point']:.3f} [{ends}] of plain by {ratio['unit']}"
        print(f"{row['arm']:10} {rate:>14} over {row['starts']} starts{text}")
    for name, run in document["runs"].items():
        late = run.get("straggler")
        ranks = ", ".join(f"{row['rank']}: {row['cycle_ms']:.3f}" for row in run.get("ranks") or [])
        print(f"{name}: ms a cycle by rank {ranks or '-'}" + (f"; straggler {late['rank']}" if late else ""))
        for sentence in (run.get("collectives") or {}).get("sentences", []):
            print(f"  {sentence}")


def draft_prices(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each shape at N ranks: what draft and extend cost there, their collectives, and the draft alone on one GPU.

    Device busy time of the phases in the deep windows; with host clocks alone (the rehearsal) there is none.
    """
    found: dict[str, dict[str, Any]] = {}
    for body, facts in document.items():
        shape, _, tp = body.rpartition("-tp")
        alone = document.get(f"{shape}-draft-tp1")
        run = facts["runs"].get("default.1")
        if run is None or alone is None or body.endswith("-draft-tp1"):
            continue
        ours, single = busy(run), busy(alone["runs"].get("draft.1") or {})
        if ours is None or single is None:
            continue
        moved = sum(row["ms"]["point"] for row in _drafting(run))
        waited = sum((row["waiting_ms"] or {"point": 0.0})["point"] for row in _drafting(run))
        sentence = (
            f"{body}: draft and extend take {ours:.3f} ms a cycle on the device, {moved:.3f} of it in collectives "
            f"({waited:.3f} waiting); alone at tp 1 they take {single:.3f} ms: drafting at tp {tp} "
            f"{'costs' if ours > single else 'saves'} {abs(ours - single):.3f} ms a cycle"
        )
        prices = {"ms": ours, "collectives_ms": moved, "waiting_ms": waited, "alone_ms": single}
        found[body] = {**prices, "sentence": sentence}
    return found


def _drafting(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = (run.get("collectives") or {}).get("phases") or []
    return [row for row in rows if row["phase"] in ("draft", "extend")]


def busy(run: Mapping[str, Any]) -> float | None:
    """Device busy time of draft and extend in the first rank's window, ms a cycle."""
    windows = (run.get("device") or {}).get("windows") or []
    rows = [row for row in (windows[0].get("classes") or []) if row["phase"] in ("draft", "extend")] if windows else []
    return sum(row["ms"] for row in rows) if rows else None
