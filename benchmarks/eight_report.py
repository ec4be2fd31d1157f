"""What the parts of eight_gpu.py measured so far: arms with intervals, ranks, skew, collectives, the draft at TP 1."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from eight_tables import show
from gpu_steps import read
from gpu_together import trace_of

import specmeter
from specmeter.analysis.collective_document import collective_facts
from specmeter.analysis.collective_words import draft_collectives_ms
from specmeter.analysis.device_document import device_facts
from specmeter.analysis.stats import Interval, paired_ratio, ratio_interval
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.deep import load_deep

REFERENCES = ("plain", "default", "tuned")
DRAFTING = ("draft", "extend")
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
        runs = {f"{one.arm}.{one.number}": kept(one, work / "report") for one in mine}
        document[body] = {"arms": arms_of(mine), **chosen(work, body), "runs": runs}
        show(body, document[body])
    document["draft_at_tp1"] = draft_prices(document)
    for line in document["draft_at_tp1"].values():
        print(line["sentence"])
    (work / "eight.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    return document


def chosen(work: Path, body: str) -> dict[str, Any]:
    """How the tuned steps were chosen, and the experts that the speculative text reaches; None: not measured."""
    results = work / "results"
    experts = (read(results / f"{body}.experts.1", "experts") or {}).get("measured")
    text = read(results / f"{body}.default.1", "phases1") or {}
    distinct = {"distinct": text["distinct_ids"], "of": text["ids"]} if "distinct_ids" in text else None
    return {"steps": read(results, f"steps-{body}"), "experts": experts, "text_ids": distinct}


def found_in(work: Path) -> list[Started]:
    """Every start that has measured its phases at batch 1, done or cut off after that."""
    found = []
    for folder in sorted((work / "results").iterdir()) if (work / "results").is_dir() else []:
        match = _PART.match(folder.name)
        document = read(folder, "phases1") if match is not None else None
        if match is not None and document is not None:
            rates = {prompt: float(np.mean(values)) for prompt, values in document["rates"].items()}
            found.append(Started(match["body"], match["arm"], int(match["start"]), folder, rates))
    return found


def arms_of(started: Sequence[Started]) -> list[dict[str, Any]]:
    """Each arm's rate, and its ratios to plain decoding, the default steps and the tuned ones.

    Over starts where each side has two or more, else over prompts of one start, which says nothing about other starts.
    """
    by_arm: dict[str, list[Started]] = {}
    for one in sorted(started, key=lambda one: one.number):
        by_arm.setdefault(one.arm, []).append(one)
    rows = []
    for arm, mine in by_arm.items():
        rates = [geometric(one.rates) for one in mine if one.rates]
        row: dict[str, Any] = {"arm": arm, "starts": len(rates), "tok_s": float(np.mean(rates)) if rates else None}
        for other in REFERENCES:
            ratio = ratio_of(mine, by_arm.get(other, [])) if arm != other and rates else None
            row[f"over_{other}"] = ratio.as_json() if ratio else None
        rows.append(row)
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


def kept(one: Started, out: Path) -> dict[str, Any]:
    """``run_of``, or what an earlier call made of the same results: a call's time is for measuring."""
    newest = max(path.stat().st_mtime_ns for path in one.folder.glob("*.json"))
    path = out / f"{one.folder.name}.json"
    if path.is_file() and path.stat().st_mtime_ns > newest:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    found = run_of(one, out)
    path.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return found


def run_of(one: Started, out: Path) -> dict[str, Any]:
    """Ranks, skew, collectives and device time of one start, its whole report as text beside.

    From its run directory; where that did not come back whole, from the analysis of its phases, with the reason.
    """
    document = dict((read(one.folder, "phases1") or {}).get("analysis") or {})
    folder = next(iter(one.folder.glob("run-*")), None)
    try:
        if folder is None:
            raise FileNotFoundError(f"{one.folder.name} has no run directory")
        run = specmeter.load(folder)
        document = dict(run.analysis)
        trace = trace_of(run)
        windows = load_deep(folder, trace)
        document["collectives"] = collective_facts(trace, windows)
        document["device"] = device_facts(document.get("device"), trace, windows)
    except (OSError, ValueError, SpecmeterError) as error:
        document["reason"] = str(error)
    (out / f"{one.folder.name}.txt").write_text(render_analysis(document, width=120))
    keys = ("cycle", "phases", "ranks", "straggler", "phase_stragglers", "rank_skew", "collectives", "device", "reason")
    return {key: document.get(key) for key in keys}


def draft_prices(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each shape at N ranks: what draft and extend cost there, and the draft alone at tensor parallel 1.

    Device busy time of the phases in the deep windows where there are some, else their host times, which are the work
    itself on a CPU. ``ratio`` is N ranks' over alone, with an interval over starts where each side has two or more.
    ``foretold_ms`` is what the what-if "draft at TP 1" takes away: the collectives' own time in draft and extend.
    """
    found: dict[str, dict[str, Any]] = {}
    for body, facts in document.items():
        shape, _, tp = body.rpartition("-tp")
        alone = document.get(f"{shape}-draft-tp1")
        if alone is None or body.endswith("-draft-tp1"):
            continue
        ours, single = sides(facts["runs"], "default"), sides(alone["runs"], "draft")
        clock = "device" if ours["device"] and single["device"] else "host"
        if ours[clock] and single[clock]:
            found[body] = _price(body, tp, clock, ours[clock], single[clock], facts["runs"].get("default.1") or {})
    return found


def _price(body: str, tp: str, clock: str, ours: Sequence[float], single: Sequence[float],
           run: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    here, alone = float(np.mean(ours)), float(np.mean(single))
    ratio = ratio_interval(ours, single, "server start").as_json()
    low, high = ratio["low"], ratio["high"]
    ends = f"[{low:.2f}, {high:.2f}]" if low is not None and high is not None else "no interval: one start a side"
    rows = [row for row in (run.get("collectives") or {}).get("phases") or [] if row["phase"] in DRAFTING]
    moved = sum(row["ms"]["point"] for row in rows) if rows else None
    waited = sum((row["waiting_ms"] or {"point": 0.0})["point"] for row in rows) if rows else None
    foretold = sum(draft_collectives_ms(run).values()) if rows else None
    within = f", {moved:.3f} of it in collectives ({waited:.3f} waiting)" if rows else ""
    sentence = (
        f"{body}: draft and extend take {here:.3f} ms a cycle ({clock}){within}; alone at tp 1 {alone:.3f} ms: "
        f"drafting at tp {tp} {'costs' if here > alone else 'saves'} {abs(here - alone):.3f} ms a cycle, "
        f"x {here / alone:.2f} {ends}"
    )
    if foretold is not None:
        sentence += f'. The what-if "draft at TP 1" foretells {foretold:.3f} ms less, measured {here - alone:.3f}'
    return {
        "ms": here, "clock": clock, "alone_ms": alone, "ratio": ratio, "collectives_ms": moved, "waiting_ms": waited,
        "foretold_ms": foretold, "measured_ms": here - alone, "sentence": sentence,
    }  # fmt: skip


def sides(runs: Mapping[str, Any], arm: str) -> dict[str, list[float]]:
    """Draft and extend of each start of an arm, ms a cycle, by clock."""
    mine = [run for name, run in runs.items() if name.rpartition(".")[0] == arm]
    device, host = [busy(run) for run in mine], [hosted(run) for run in mine]
    return {"device": [ms for ms in device if ms is not None], "host": [ms for ms in host if ms is not None]}


def busy(run: Mapping[str, Any]) -> float | None:
    """Device busy time of draft and extend in the first rank's window, ms a cycle; None without a window."""
    windows = (run.get("device") or {}).get("windows") or []
    rows = [row for row in (windows[0].get("classes") or []) if row["phase"] in DRAFTING] if windows else []
    return sum(row["ms"] for row in rows) if rows else None


def hosted(run: Mapping[str, Any]) -> float | None:
    """Host time of draft and extend, ms a cycle: the ranks' mean, their collectives in it only where points name them.

    None where no such phase was timed.
    """
    ranks = run.get("ranks") or []
    tables = [row["phases_ms"] for row in ranks] or [{row["phase"]: row["ms"] for row in run.get("phases") or []}]
    found = [sum(table[phase] for phase in DRAFTING if phase in table) for table in tables]
    return float(np.mean(found)) if any(found) else None
