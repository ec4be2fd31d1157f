"""Pairs of short blocks inside one server: what always-on costs, and whether a server is whole after a deep window.

A block is one greedy request; both blocks of a pair ask the same prompt. Compared are milliseconds a cycle, by the
server's own count of verify steps, so that acceptance is in neither side. Estimates are Hodges and Lehmann's: a block
that the machine disturbed moves them little.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import NormalDist
from typing import Any

import gpu_windows as windows
import numpy as np
from gpu_client import Answer, Load, Prompt, drive
from gpu_fleet import Server

from specmeter import control
from specmeter.analysis.stats import paired_ratio

SETTLE = Load(rounds=1, tokens=24, prompts=1)
AROUND = Load(rounds=4, tokens=192, prompts=6)


def centre(logs: Sequence[float], level: float = 0.95) -> dict[str, float | int | str | None]:
    """Ratio with its interval from pairs' log ratios: the median of all means of two of them (Hodges and Lehmann).

    The ends are the order statistics that Wilcoxon's signed ranks leave, by their normal approximation (Hollander and
    Wolfe, Nonparametric Statistical Methods, 2nd edition, 3.2 and 3.3); none (null) below six pairs.
    """
    x = np.asarray(logs, float)
    n = len(x)
    means = np.sort(((x[:, None] + x[None, :]) / 2)[np.triu_indices(n)])
    z = NormalDist().inv_cdf(0.5 + level / 2)
    out = math.floor(n * (n + 1) / 4 - z * math.sqrt(n * (n + 1) * (2 * n + 1) / 24))
    ends = (float(means[out - 1]), float(means[-out])) if n >= 6 and out >= 1 else (None, None)
    low, high = (None if end is None else math.exp(end) for end in ends)
    method = "median of the pairs' means of two, Wilcoxon's signed ranks"
    return {"low": low, "point": math.exp(float(np.median(means))), "high": high, "n": n, "method": method}


def cycle_of(answer: Answer) -> dict[str, float]:
    """Of one answer: ms a cycle, and the median of the gaps between its events, which is a cycle where each brings one.

    Without a count of the server's (plain decoding) every token is a cycle. Raises RuntimeError for a failed request.
    """
    request = answer.request
    if request.error:
        raise RuntimeError(f"{request.request_id}: {request.error}")
    cycles = answer.cycles or len(answer.ids) - 1
    gaps = np.diff(np.asarray(answer.at, float))
    gap = float(np.median(gaps)) / 1e6 if len(gaps) else math.nan
    return {"ms": (request.end_ns - request.first_ns) / 1e6 / cycles, "gap_ms": gap, "cycles": cycles}


def budget(
    server: Server, prompts: Sequence[Prompt], permille: int, seconds: float = 100.0, tokens: int = 320, seed: int = 3
) -> dict[str, Any]:
    """Always-on at a share of sampled cycles against the original code: as many pairs of blocks as fit ``seconds``.

    The order within each pair is drawn. A short request goes ahead of each block, so that arming itself is in none.
    """
    link, order, end = windows.link_of(server), random.Random(seed), time.monotonic() + seconds
    sampled = control.Sampling(seed, permille, "the default budget")
    pairs: list[dict[str, Any]] = []
    while time.monotonic() < end:
        number, pair = len(pairs), {}
        prompt = prompts[number % len(prompts)]
        for armed in order.sample((True, False), 2):
            if armed:
                control.arm(link, sampling=sampled)
            drive(server.url, [prompt], SETTLE, "settle", "settle")
            [answer] = drive(server.url, [prompt], Load(1, tokens, 1, 1), f"b{number}-{armed}", "spec").answers
            if armed:
                control.disarm(link)
            pair["armed" if armed else "original"] = cycle_of(answer)
        pairs.append({**pair, "prompt": number % len(prompts)})
    found = compared(pairs, "armed", "original")
    return {
        "line": f"always-on at {permille} of 1000: {shown(found['cycle'])}; events {shown(found['gap'])}",
        "permille": permille,
        "percent": percent(found["cycle"]),
        **found,
        "pairs": pairs,
    }


def compared(pairs: Sequence[dict[str, Any]], ours: str, theirs: str) -> dict[str, Any]:
    """Ratios of ours to theirs: ``cycle`` (ms a cycle) and ``gap`` (events) robustly, ``means`` by Student's t."""
    ms = {side: [pair[side]["ms"] for pair in pairs] for side in (ours, theirs)}
    gaps = {side: [pair[side]["gap_ms"] for pair in pairs] for side in (ours, theirs)}
    whole = [(a, b) for a, b in zip(gaps[ours], gaps[theirs], strict=True) if a > 0 and b > 0]
    return {
        "cycle": centre(np.log(np.divide(ms[ours], ms[theirs])).tolist()),
        "gap": centre([math.log(a / b) for a, b in whole]) if whole else None,
        "means": paired_ratio(ms[ours], ms[theirs], "block pair").as_json(),
        "median_ms": {side: float(np.median(values)) for side, values in ms.items()},
    }


def percent(ratio: dict[str, Any]) -> dict[str, float | None]:
    """A ratio's ends as what is added, percent."""
    return {end: None if ratio[end] is None else 100 * (ratio[end] - 1) for end in ("low", "point", "high")}


def shown(ratio: dict[str, Any] | None) -> str:
    """``+0.52 % [0.11, 0.93]``, or why there is none."""
    if ratio is None:
        return "not counted"
    ends = percent(ratio)
    told = ["-" if ends[end] is None else f"{ends[end]:.2f}" for end in ("low", "high")]
    return f"{ends['point']:+.2f} % [{told[0]}, {told[1]}] ({ratio['n']} pairs)"


def around_deep(server: Server, prompts: Sequence[Prompt], cycles: int, setting: str = windows.SPEC) -> dict[str, Any]:
    """A deep window with the same requests before and after it, the probes out: does the profiler leave whole?

    ``first`` compares the first quarter after it, ``last`` the last, each with the same requests before.
    """
    before = drive(server.url, prompts, AROUND, "before", setting).answers
    deep = windows.deep(server, prompts, cycles, 1, setting)
    after = drive(server.url, prompts, AROUND, "after", setting).answers
    pairs = [{"before": cycle_of(a), "after": cycle_of(b)} for a, b in zip(before, after, strict=True)]
    size = max(1, len(pairs) // AROUND.rounds)
    found = compared(pairs, "after", "before")
    return {
        **deep,
        "line": f"after the profiler against before it: {shown(found['cycle'])}",
        "after": found,
        "first": compared(pairs[:size], "after", "before"),
        "last": compared(pairs[-size:], "after", "before"),
        "pairs": pairs,
        "load_around": asdict(AROUND),
    }
