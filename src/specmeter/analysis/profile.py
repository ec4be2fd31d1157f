"""The analysis of one profiled run: breakdown, acceptance, baseline, break-even, verdict, as analysis.json has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter import __version__
from specmeter.analysis.acceptance import Acceptance, acceptance, clusters
from specmeter.analysis.breakdown import Breakdown, breakdown, select
from specmeter.analysis.overhead import overhead_facts
from specmeter.analysis.ranks import rank_tables
from specmeter.analysis.sampling import Share, clean_cycles, cycle_times, sampling_facts
from specmeter.analysis.seams import device_facts
from specmeter.analysis.setting_names import common_steps
from specmeter.analysis.stalls import stall_facts, without_stalls
from specmeter.analysis.stats import (
    Interval,
    cluster_ratio,
    drift_test,
    mean_interval,
    paired_ratio,
    verdict,
)
from specmeter.errors import SpecmeterError
from specmeter.trace.build import RankTrace, Trace
from specmeter.trace.cycles import DROPS, KEPT, KINDS
from specmeter.trace.requests import Request, finished
from specmeter.trace.ring import Ring

SCHEMA = "specmeter/analysis/1"
BASELINE = "baseline"
# The delta method is a straight line through the logarithm: at three times the estimate and more it says nothing.
WIDEST_LOG = 3.0
# The two ways to the gain differ by a few per cent on a steady machine: requests end within a cycle.
_AGREE = 1.15


@dataclass(frozen=True)
class Baseline:
    """The time of one decode step without speculation, ms, and its source, or the reason why it is not known."""

    step_ms: Interval | None
    source: str
    reason: str = ""


def baseline_from_requests(requests: Sequence[Request], setting: str = BASELINE) -> Baseline:
    """The baseline step from the requests' decode rates: (end - first token) / (tokens - 1), each request a unit."""
    steps = [1000 / r.decode_rate for r in finished(requests, setting) if r.decode_rate]
    if not steps:
        return Baseline(None, "requests", f"no request of the setting {setting!r} finished with two tokens or more")
    return Baseline(mean_interval(steps, "request"), "decode time of requests without speculation")


def baseline_from_trace(trace: Trace, setting: str = BASELINE) -> Baseline:
    """The baseline step from the cycles of the requests that ran without speculation."""
    chosen = select(trace.main, np.array([r.setting == setting for r in trace.requests], bool))
    chosen = without_stalls(trace.main.cycles.dur_ns, chosen)
    if not trace.requests or not chosen.any():
        return Baseline(None, "cycles", f"no decode cycle of the setting {setting!r} was recorded")
    return Baseline(cycle_interval(trace.main, chosen), "cycles without speculation")


def cycle_interval(rank: RankTrace, chosen: NDArray[np.bool_]) -> Interval:
    """The mean cycle in ms over the chosen cycles, with an interval over requests."""
    at = np.flatnonzero(chosen)
    unit, name = clusters(rank.cycles.request[at], at)
    _, group = np.unique(unit, return_inverse=True)
    return cluster_ratio(np.bincount(group, weights=rank.cycles.dur_ns[at] / 1e6), np.bincount(group), name)


def analyse(
    trace: Trace,
    requests: Sequence[Request],
    baseline: Baseline | None = None,
    setting: str | None = None,
    rings: Sequence[Ring] = (),
    share: Share | None = None,
    reports: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The document of analysis.json for one setting (None: every request that is not the baseline's).

    ``baseline`` None takes it from the trace's own baseline cycles, if there are any. ``rings`` are read for device
    spans. With ``share`` some of the cycles were sampled under a budget: the phases are those of the sampled cycles,
    the cycle's time is that of all; ``reports`` are what the processes said. Raises SpecmeterError when no decode
    cycle remains.
    """
    mask = np.array([_wanted(r, setting) for r in trace.requests], bool)
    rank = trace.main
    chosen = select(rank, mask)
    if not chosen.any():
        dropped = ", ".join(f"{count} {why}" for why, count in _dropped(rank).items())
        raise SpecmeterError(
            "No decode cycle is left to analyse",
            f"Of {len(rank.cycles)} recorded cycles: {dropped or 'none was a decode cycle'}.",
            "Record longer, with more tokens a request.",
        )
    base = baseline_from_trace(trace) if baseline is None else baseline
    probed = chosen & (rank.cycles.probed == 1)
    averaged = probed if probed.any() else chosen
    timed = without_stalls(rank.cycles.dur_ns, averaged)
    table = breakdown(rank, trace.index, timed)
    comparable = probed if share is None else clean_cycles(rank, chosen, trace.requests)
    # Under overlap scheduling a sampled cycle reads the counts of the one before, which may be a clean one.
    accepted = acceptance(rank, comparable)
    every = timed if share is None else without_stalls(rank.cycles.dur_ns, comparable)
    cycle = cycle_interval(rank, every)
    gain = _gain(cycle, accepted, base)
    measured = _measured(requests, setting)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "profile",
        "version": __version__,
        "engine": {"name": trace.plan.get("engine"), "version": trace.plan.get("engine_version")},
        "setting": setting,
        "steps": common_steps(rank.cycles.steps[np.flatnonzero(chosen)]),
        "clock": "host",
        "cycle": {
            "mean_ms": cycle.as_json(),
            **_cycle_facts(table, rank, without_stalls(rank.cycles.dur_ns, chosen)),
            **(cycle_times(rank, every) if share is not None else {}),
            "stalled": stall_facts(rank.cycles.dur_ns, averaged),
        },
        **_tables(table),
        "acceptance": _acceptance(accepted),
        "baseline": {
            "step_ms": base.step_ms.as_json() if base.step_ms else None,
            "source": base.source,
            "reason": base.reason,
        },
        **gain,
        "device": device_facts(rings, rank, timed),
        "measured_speedup": measured.as_json() if measured else None,
        "overhead": overhead_facts(rank, trace.requests),
        **({"sampling": sampling_facts(rank, chosen, trace.requests, share, reports)} if share is not None else {}),
        **rank_tables(trace, mask),
        "records": {"count": trace.records, "overwritten": trace.overwritten, "holes": trace.holes},
        "refused": list(trace.plan.get("refused", [])),
    }
    document["verdict"] = _verdict(document, measured)
    return document


def _wanted(request: Request, setting: str | None) -> bool:
    if request.error:
        return False
    return request.setting != BASELINE if setting is None else request.setting == setting


def _dropped(rank: RankTrace) -> dict[str, int]:
    drop = rank.cycles.drop
    return {why: int(np.count_nonzero(drop == code)) for code, why in enumerate(DROPS) if code and (drop == code).any()}


def _cycle_facts(table: Breakdown, rank: RankTrace, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    cycles = rank.cycles
    kept = cycles.drop == KEPT
    at = np.flatnonzero(chosen)
    drift = drift_test(cycles.t0_ns[at].astype(float), cycles.dur_ns[at].astype(float)) if len(at) > 3 else None
    batch = cycles.batch[at]
    return {
        "p50_ms": table.p50_ms,
        "p95_ms": table.p95_ms,
        "count": table.cycles,
        "kinds": {name: int(np.count_nonzero(kept & (cycles.kind == code))) for code, name in enumerate(KINDS)},
        "dropped": _dropped(rank),
        "batch_mean": float(batch[batch > 0].mean()) if bool((batch > 0).any()) else None,
        "drift": asdict(drift) if drift else None,
    }


def _tables(table: Breakdown) -> dict[str, Any]:
    return {
        "phases": [asdict(row) for row in table.phases],
        "points": [asdict(row) for row in table.rows],
        "frames": [asdict(row) for row in table.frames],
        "beside": [asdict(row) for row in table.beside],
        "draft_steps": [asdict(step) for step in table.steps],
        "coverage": {
            "leaf_percent": table.leaf_percent,
            "of_which_wait_percent": table.wait_percent,
            "glue_percent": table.glue_percent,
            "unattributed_percent": table.unattributed_percent,
        },
    }


def _acceptance(found: Acceptance | None) -> dict[str, Any]:
    if found is None:
        return {"length_tokens": None, "positions": [], "reason": "the accepted counts were not read in this engine"}
    return {
        "length_tokens": found.length.as_json(),
        "sequences": found.sequences,
        "positions": [asdict(p) for p in found.positions],
        "reason": "",
    }


def _gain(cycle: Interval, accepted: Acceptance | None, base: Baseline) -> dict[str, Any]:
    """Break-even accept length = cycle / baseline step; expected speed-up = accept length / break-even."""
    if base.step_ms is None:
        return {
            "break_even_tokens": None,
            "expected_speedup": None,
            "reason": base.reason or "no baseline was measured",
        }
    even = _divide(cycle, base.step_ms)
    if accepted is None:
        return {"break_even_tokens": even.as_json(), "expected_speedup": None, "reason": "accept length is not known"}
    gain = _divide(accepted.length, even)
    return {"break_even_tokens": even.as_json(), "expected_speedup": gain.as_json(), "reason": ""}


def _divide(a: Interval, b: Interval) -> Interval:
    """The ratio of two independent estimates; the relative half widths add in squares (delta method on the logs)."""
    n = min(a.n, b.n)
    point = a.point / b.point
    method = f"delta method on logs of ({a.method}) and ({b.method})"
    if not (math.isfinite(a.high) and math.isfinite(b.high)):
        return Interval(-math.inf, point, math.inf, a.level, method, n, a.unit)
    half = math.hypot((a.high - a.low) / 2 / a.point, (b.high - b.low) / 2 / b.point)
    if half > WIDEST_LOG:
        return Interval(-math.inf, point, math.inf, a.level, method, n, a.unit)
    return Interval(point * math.exp(-half), point, point * math.exp(half), a.level, method, n, a.unit)


def measured_ratio(requests: Sequence[Request], setting: str | None, baseline: str = BASELINE) -> Interval | None:
    """Decode rate of a setting over the baseline's, paired by prompt; None for fewer than two shared prompts."""
    rates: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for r in requests:
        rate = r.decode_rate
        if rate and (r.setting == baseline or _wanted(r, setting)):
            rates[r.setting == baseline].setdefault(r.prompt_id, []).append(rate)
    shared = sorted(rates[True].keys() & rates[False].keys())
    if len(shared) < 2:
        return None
    return paired_ratio(
        [float(np.mean(rates[False][p])) for p in shared], [float(np.mean(rates[True][p])) for p in shared], "prompt"
    )


def _measured(requests: Sequence[Request], setting: str | None) -> Interval | None:
    return None if setting == BASELINE else measured_ratio(requests, setting)


def _verdict(document: dict[str, Any], measured: Interval | None) -> dict[str, Any]:
    """Faster, slower or inconclusive, and the sentence that says why."""
    expected = document["expected_speedup"]
    if measured is not None:
        ratio: Interval | None = measured
        basis = "decode rates of the same prompts with and without speculation"
    elif expected is not None and expected["low"] is not None:
        ratio, basis = Interval(**expected), "accept length over break-even"
    else:
        ratio, basis = None, document["reason"] or "want of an interval that tells anything"
    word = verdict(ratio)
    point = ratio.point if ratio else (expected["point"] if expected else None)
    return {"word": word, "basis": basis, "sentence": _sentence(document, word, point)}


def _sentence(document: dict[str, Any], word: str, ratio: float | None) -> str:
    length, even = document["acceptance"]["length_tokens"], document["break_even_tokens"]
    tokens = f"yields {length['point']:.2f} tokens" if length else "yields an unknown number of tokens"
    phases = sorted(document["phases"], key=lambda row: -row["ms"])
    most = f"; {phases[0]['name']} is {phases[0]['percent']:.0f} % of the cycle" if phases else ""
    waiting = document["coverage"]["of_which_wait_percent"]
    if waiting >= 5 and not (phases and phases[0]["name"] == "wait"):
        most += f", waiting {waiting:.0f} %"
    idle = (document.get("device") or {}).get("idle_percent")
    most += "" if idle is None else f"; no timed point runs on the device for {idle:.0f} % of it"
    cycle = f"a cycle takes {document['cycle']['mean_ms']['point']:.2f} ms and {tokens}"
    if even is None:
        return f"Gain not known ({document['reason']}): {cycle}{most}."
    cycle = f"a cycle costs {even['point']:.2f} baseline steps and {tokens}"
    if ratio is None or word == "inconclusive":
        head = "No clear gain or loss" if ratio is None else f"No clear gain or loss ({100 * (ratio - 1):+.0f} %)"
    else:
        head = f"Speculation {'wins' if word == 'faster' else 'loses'} {abs(100 * (ratio - 1)):.0f} %"
    return f"{head}: {cycle}{most}.{_disagreement(document, ratio)}"


def _disagreement(document: dict[str, Any], ratio: float | None) -> str:
    """What to say when the cycles' own arithmetic and the requests' decode rates tell different gains; else nothing."""
    expected = document["expected_speedup"]
    if not ratio or not expected or abs(math.log(ratio / expected["point"])) < math.log(_AGREE):
        return ""
    return (
        f" The mean cycle alone would give {100 * (expected['point'] - 1):+.0f} %: stalls or drift between them, so "
        "measure again on a quiet machine."
    )
