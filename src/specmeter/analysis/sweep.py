"""Several settings against the baseline: speed, ratio with its interval, accept length, cycle, break-even, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmeter import __version__
from specmeter.analysis.acceptance import acceptance
from specmeter.analysis.breakdown import select
from specmeter.analysis.profile import BASELINE, SCHEMA, cycle_interval
from specmeter.analysis.stalls import stall_facts, without_stalls
from specmeter.analysis.starts import separate_ratio
from specmeter.analysis.stats import Interval, drift_test, mean_interval, paired_ratio, ratio_interval, verdict
from specmeter.analysis.sweep_starts import START, StartCycles, over_starts
from specmeter.trace.build import Trace
from specmeter.trace.requests import Request, finished

# Equal starts differ by up to 6 %: fewer cannot tell a setting from a start.
MIN_STARTS = 3


@dataclass(frozen=True)
class Arm:
    """One setting: its name (``baseline`` for no speculation), its flags, its requests, and its trace if there is one.

    Arms that ran interleaved in one process share one trace; ``requests`` then are those of this setting only.
    ``starts`` is what was seen in the starts of a setting that had its own.
    """

    setting: str
    settings: Mapping[str, int]
    requests: Sequence[Request]
    trace: Trace | None = None
    starts: Sequence[StartCycles] = ()


def analyse_sweep(arms: Sequence[Arm], threshold: float = 0.01, reference: str = BASELINE) -> dict[str, Any]:
    """The document of analysis.json, kind ``sweep``; differences within ``threshold`` (0.01: 1 %) get no verdict.

    Within one server start the ratio is over pairs of one block and prompt; across starts the start is the unit.
    ``reference`` names the setting that the others are compared with, if that is not plain decoding.
    """
    base = next((arm for arm in arms if arm.setting == reference), None)
    rows = [_arm(arm, base, threshold) for arm in arms]
    known = [row for row in rows if row["tokens_per_s"] is not None]
    best = max(known, key=lambda row: row["tokens_per_s"]["point"]) if known else None
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "sweep",
        "version": __version__,
        "threshold": threshold,
        "baseline": reference if base else None,
        "reason": "" if base else "no baseline was measured",
        "arms": rows,
        "best": best["setting"] if best else None,
        "not_told_apart": _ties(arms, best["setting"], reference) if best else [],
    }
    document["verdict"] = _verdict(document, best)
    return document


def _ties(arms: Sequence[Arm], best: str, reference: str) -> list[str]:
    """The speculative settings that these requests cannot tell from the best: its ratio to them may be 1."""
    winner = next(arm for arm in arms if arm.setting == best)
    others = [arm for arm in arms if arm.setting not in (best, reference) and finished(arm.requests)]
    ratios = [(arm.setting, compare(winner.requests, arm.requests)) for arm in others]
    return [setting for setting, ratio in ratios if ratio is None or ratio.low <= 1]


def _arm(arm: Arm, base: Arm | None, threshold: float) -> dict[str, Any]:
    rates = [r.decode_rate for r in finished(arm.requests) if r.decode_rate]
    speed = mean_interval(rates, "request") if rates else None
    row: dict[str, Any] = {
        "setting": arm.setting,
        "settings": dict(arm.settings),
        "requests": len(rates),
        "failed": sum(1 for r in arm.requests if r.error),
        "tokens_per_s": speed.as_json() if speed else None,
        "accept_length_tokens": None,
        "cycle_ms": None,
        "stalled": None,
        "break_even_tokens": None,
        "drift": _drift(arm.requests),
        "ratio": None,
        "verdict": "baseline" if arm.setting == BASELINE else "reference" if arm is base else "inconclusive",
        "reason": "" if speed else "no request finished",
    }
    if arm.trace is not None:
        names = {r.request_id for r in arm.requests}
        rank = arm.trace.main
        chosen = select(rank, np.array([r.request_id in names for r in arm.trace.requests], bool))
        if chosen.any():
            dur_ns = rank.cycles.dur_ns
            row["cycle_ms"] = cycle_interval(rank, without_stalls(dur_ns, chosen)).as_json()
            row["stalled"] = stall_facts(dur_ns, chosen)
            accepted = acceptance(rank, chosen)
            row["accept_length_tokens"] = accepted.length.as_json() if accepted else None
    if arm.starts:
        row |= over_starts(arm.starts, base.starts if base is not None and arm is not base else ())
    if base is not None and arm is not base:
        ratio = compare(arm.requests, base.requests)
        row["ratio"] = ratio.as_json() if ratio else None
        row["verdict"] = verdict(ratio, threshold)
        if ratio is not None and ratio.unit == START and ratio.n < MIN_STARTS:
            row["verdict"] = "inconclusive"
            row["reason"] = f"fewer than {MIN_STARTS} server starts a side"
        if row["break_even_tokens"] is None:
            row["break_even_tokens"] = _break_even(row, base)
    return row


def _break_even(row: dict[str, Any], base: Arm) -> float | None:
    """Cycle / baseline step: a cycle of the baseline under the same rule for stalls, else of its requests' rates."""
    if not row["cycle_ms"]:
        return None
    if base.trace is not None:
        names = {r.request_id for r in base.requests}
        chosen = select(base.trace.main, np.array([r.request_id in names for r in base.trace.requests], bool))
        if chosen.any():
            dur_ns = base.trace.main.cycles.dur_ns
            step = cycle_interval(base.trace.main, without_stalls(dur_ns, chosen))
            return float(row["cycle_ms"]["point"] / step.point)
    steps = [1000 / r.decode_rate for r in finished(base.requests) if r.decode_rate]
    return float(row["cycle_ms"]["point"] / np.mean(steps)) if steps else None


def compare(ours: Sequence[Request], theirs: Sequence[Request]) -> Interval | None:
    """Our decode rate over theirs. None when nothing can be paired."""
    starts = {r.start for r in [*ours, *theirs]}
    if len(starts) > 1:
        a, b = _by_key(ours, lambda r: r.start), _by_key(theirs, lambda r: r.start)
        if not a or not b:
            return None
        if a.keys() == b.keys():
            shared = sorted(a)
            return paired_ratio([a[k] for k in shared], [b[k] for k in shared], START)
        return _apart(a, b)
    a, b = _by_key(ours, lambda r: (r.block, r.prompt_id)), _by_key(theirs, lambda r: (r.block, r.prompt_id))
    unit = "pair of one block and prompt"
    if not a.keys() & b.keys():
        a, b, unit = _by_key(ours, lambda r: r.prompt_id), _by_key(theirs, lambda r: r.prompt_id), "prompt"
    shared = sorted(a.keys() & b.keys())
    return paired_ratio([a[k] for k in shared], [b[k] for k in shared], unit) if shared else None


def _apart(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval:
    """Starts of their own, by their place in the session: as ``specmeter compare`` does, with the drift in the model.

    With three starts in all a drift cannot be told: Welch's t then.
    """
    both = [*ours.values(), *theirs.values()]
    if len(both) < 4 or ours.keys() & theirs.keys():
        return ratio_interval(list(ours.values()), list(theirs.values()), START)
    sides = [1] * len(ours) + [0] * len(theirs)
    return separate_ratio(np.log(both), sides, [*ours, *theirs])[0]


def _by_key(requests: Sequence[Request], key: Any) -> dict[Any, float]:
    """The geometric mean decode rate of the requests of each key."""
    logs: dict[Any, list[float]] = {}
    for r in finished(requests):
        rate = r.decode_rate
        if rate:
            logs.setdefault(key(r), []).append(float(np.log(rate)))
    return {k: float(np.exp(np.mean(v))) for k, v in logs.items()}


def _drift(requests: Sequence[Request]) -> dict[str, Any] | None:
    timed = [(r.send_ns / 1e9, r.decode_rate) for r in finished(requests) if r.decode_rate]
    found = drift_test([t for t, _ in timed], [rate for _, rate in timed]) if len(timed) > 3 else None
    return {"percent": found.percent, "p_value": found.p_value, "n": found.n} if found else None


def _verdict(document: dict[str, Any], best: dict[str, Any] | None) -> dict[str, Any]:
    if best is None:
        return {"word": "inconclusive", "sentence": "No setting finished a request."}
    if document["baseline"] is None:
        sentence = (
            f"{best['setting']} is the fastest, {best['tokens_per_s']['point']:.1f} tok/s; no baseline was measured."
        )
        return {"word": "inconclusive", "sentence": sentence}
    if best["setting"] == BASELINE:
        settled = all(row["verdict"] in ("slower", "baseline") for row in document["arms"])
        sentence = "Speculation should be off: " + (
            "every setting is slower than the baseline."
            if settled
            else "no setting is shown to be faster than the baseline."
        )
        return {"word": "slower" if settled else "inconclusive", "sentence": sentence}
    ratio = best["ratio"]
    if ratio is None:
        return {"word": "inconclusive", "sentence": f"{best['setting']} could not be paired with the baseline."}
    gain = 100 * (ratio["point"] - 1)
    if best["verdict"] == "faster":
        sentence = f"{best['setting']} is best: {gain:.0f} % faster than the baseline."
        if document["not_told_apart"]:
            sentence = f"{sentence[:-1]}; not told apart from it: {', '.join(document['not_told_apart'])}."
    else:
        sentence = f"{best['setting']} is the fastest ({gain:+.0f} %), but not shown to beat the baseline."
    return {"word": best["verdict"], "sentence": sentence}
