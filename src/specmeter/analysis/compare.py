"""Arms against the first of them: starts as units, block means, interval, verdict, and what would decide it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specmeter import __version__
from specmeter.analysis.profile import SCHEMA
from specmeter.analysis.starts import (
    MIN_STARTS,
    Floats,
    Spread,
    blocks_to_decide,
    drift_in_starts,
    separate_ratio,
    spread,
    starts_to_decide,
    together_ratio,
)
from specmeter.analysis.stats import Drift, Interval, mean_interval, verdict
from specmeter.analysis.student import t_cdf
from specmeter.trace.requests import Request, finished

ACROSS = "inconclusive across starts"
DROPPED_BLOCKS = 1


@dataclass(frozen=True)
class ArmFacts:
    """What is known of an arm besides its requests; ``facts`` goes into the document as it is."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


Starts = dict[int, dict[int, float]]
"""Start -> block -> log of the rate in tokens a second."""


def block_logs(requests: Sequence[Request], dropped: int = DROPPED_BLOCKS, least: int = 0) -> Starts:
    """The mean log decode rate of every block of every start, without each start's first ``dropped`` blocks.

    A block holds every prompt once; a block that lacks one (a failed request) is left out, since its mean would be of
    other prompts. ``least`` is how many a block holds, where other arms tell of more than these requests do.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for request in finished(requests):
        if request.block >= dropped and request.decode_rate:
            found.setdefault((request.start, request.block), []).append(math.log(request.decode_rate))
    whole = max((len(values) for values in found.values()), default=0)
    whole = max(whole, least)
    starts: Starts = {}
    for (start, block), values in sorted(found.items()):
        if len(values) == whole:
            starts.setdefault(start, {})[block] = float(np.mean(values))
    return starts


def analyse_compare(
    arms: Sequence[ArmFacts], requests: Sequence[Request], threshold: float, dropped: int = DROPPED_BLOCKS
) -> dict[str, Any]:
    """The document of analysis.json, kind ``compare``: every arm against the first.

    ``Request.setting`` names the arm and ``Request.start`` the place of the start in the session. Arms that share
    starts are compared within each of them; others by their start means.
    """
    held = Counter((r.setting, r.start, r.block) for r in finished(requests) if r.decode_rate)
    most = max(held.values(), default=0)
    logs = {arm.name: block_logs([r for r in requests if r.setting == arm.name], dropped, most) for arm in arms}
    parts = spread([[_array(blocks) for blocks in starts.values()] for starts in logs.values()])
    reference = arms[0].name
    pairs = [_pair(arm.name, reference, logs, threshold) for arm in arms[1:]]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "compare",
        "version": __version__,
        "threshold": threshold,
        "dropped_blocks": dropped,
        "reference": reference,
        "arms": [_arm(arm, logs[arm.name], requests) for arm in arms],
        "pairs": pairs,
        "start_percent": parts.start_percent if parts else None,
        "block_percent": parts.block_percent if parts else None,
        "drift_in_starts": _drift(drift_in_starts([_array(b) for starts in logs.values() for b in starts.values()])),
    }
    document["verdict"] = _verdict(pairs, reference)
    return document


def _array(blocks: Mapping[int, float]) -> Floats:
    return np.asarray(list(blocks.values()), float)


def _arm(arm: ArmFacts, starts: Starts, requests: Sequence[Request]) -> dict[str, Any]:
    rates = [math.exp(float(_array(blocks).mean())) for blocks in starts.values()]
    speed = mean_interval(rates, "server start") if rates else None
    return {
        "name": arm.name,
        **arm.facts,
        "starts": len(starts),
        "blocks": sum(len(blocks) for blocks in starts.values()),
        "failed": sum(1 for r in requests if r.setting == arm.name and r.error),
        "tokens_per_s": speed.as_json() if speed else None,
        "start_rates_tok_s": rates,
    }


def _pair(ours: str, theirs: str, logs: Mapping[str, Starts], threshold: float) -> dict[str, Any]:
    a, b = logs[ours], logs[theirs]
    paired = bool(a.keys() & b.keys())
    both = _differences(a, b)
    row: dict[str, Any] = {"arm": ours, "against": theirs, "paired_in_start": paired, "ratio": None, "reason": ""}
    row |= {"verdict": "inconclusive", "starts_to_decide": None, "blocks_to_decide": None, "drift": None}
    if not a or not b:
        return row | {"reason": "a side has no whole block"}
    if paired and not both:
        return row | {"reason": "no block of a start is whole on both sides: requests of each failed on one of them"}
    if paired:
        starts = len(both)
        ratio, variance, parts = _together(both)
    else:
        starts = min(len(a), len(b))
        ratio, variance, parts, drift = _separate(a, b)
        row["drift"] = _drift(drift)
    row["ratio"] = ratio.as_json()
    row["verdict"] = verdict(ratio, threshold)
    if starts < MIN_STARTS:
        return row | {
            "verdict": ACROSS,
            "reason": f"{starts} of at least {MIN_STARTS} starts a side",
            "starts_to_decide": MIN_STARTS,
        }
    if row["verdict"] == "inconclusive":
        row |= _what_decides(math.log(ratio.point), variance, parts, starts, threshold, paired)
    return row


def _differences(a: Starts, b: Starts) -> list[Floats]:
    """Log ratios of the blocks that are whole on both sides, an array for each start that has any."""
    shared = [(a[start], b[start]) for start in sorted(a.keys() & b.keys())]
    found = [np.asarray([x[k] - y[k] for k in sorted(x.keys() & y.keys())], float) for x, y in shared]
    return [differences for differences in found if len(differences)]


def _together(per_start: list[Floats]) -> tuple[Interval, float, Spread | None]:
    means = [float(differences.mean()) for differences in per_start]
    parts = spread([per_start])
    if len(means) < 2:
        return together_ratio(per_start[0], unit="block"), math.inf, parts
    return together_ratio(means), float(np.var(means, ddof=1)), parts


def _separate(a: Starts, b: Starts) -> tuple[Interval, float, Spread | None, Drift | None]:
    sides = [(start, 1, blocks) for start, blocks in a.items()] + [(start, 0, blocks) for start, blocks in b.items()]
    logs = [float(_array(blocks).mean()) for _, _, blocks in sides]
    places = [start for start, _, _ in sides]
    ratio, fit = separate_ratio(logs, [side for _, side, _ in sides], places)
    drift = None
    if fit.df > 0:
        error, slope = float(fit.drift_error), float(fit.drift)
        p = 2 * (1 - t_cdf(abs(slope) / error, fit.df)) if error > 0 else 1.0
        drift = Drift(100 * math.expm1(slope * (max(places) - min(places))), p, len(logs))
    parts = spread([[_array(blocks) for blocks in side.values()] for side in (a, b)])
    return ratio, float(fit.variance), parts, drift


def _what_decides(
    point: float, variance: float, parts: Spread | None, starts: int, threshold: float, paired: bool
) -> dict[str, Any]:
    more = starts_to_decide(point, variance, starts, threshold, paired)
    blocks = blocks_to_decide(point, parts, starts, threshold, paired) if parts else None
    inside = math.log1p(-threshold) <= point <= math.log1p(threshold)
    reason = "the point lies within the threshold: as it is, no number of starts would show a difference"
    if not inside:
        reason = "" if more else "so small a difference would take more than 200 starts a side"
    return {"starts_to_decide": more, "blocks_to_decide": blocks, "reason": reason}


def _drift(found: Drift | None) -> dict[str, Any] | None:
    return {"percent": found.percent, "p_value": found.p_value, "n": found.n} if found else None


def _verdict(pairs: Sequence[Mapping[str, Any]], reference: str) -> dict[str, Any]:
    if len(pairs) == 1:
        row = pairs[0]
        return {"word": row["verdict"], "sentence": _sentence(row)}
    faster = [row for row in pairs if row["verdict"] == "faster"]
    if faster:
        best = max(faster, key=lambda row: row["ratio"]["point"])
        return {"word": "faster", "sentence": f"Of {len(pairs)} arms: {_sentence(best)}"}
    words = {row["verdict"] for row in pairs}
    if words == {"slower"}:
        return {"word": "slower", "sentence": f"{reference} is faster than every other arm."}
    word = ACROSS if ACROSS in words else "inconclusive"
    return {"word": word, "sentence": f"No arm is shown to be faster than {reference}."}


def _sentence(row: Mapping[str, Any]) -> str:
    ours, theirs, ratio = row["arm"], row["against"], row["ratio"]
    if ratio is None:
        return f"{ours} could not be compared with {theirs}: {row['reason']}."
    gain = f"{100 * (ratio['point'] - 1):+.1f} %"
    if row["verdict"] in ("faster", "slower"):
        return f"{ours} is {row['verdict']} than {theirs}: {gain}."
    text = f"{ours} against {theirs}: {gain}, {row['verdict']}"
    return f"{text} ({row['reason']})." if row["reason"] else f"{text}."
