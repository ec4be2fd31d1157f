"""The part of a closed-loop load in which every stream ran: without its ramp and its ramp-down."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specmeter.bench.client import Outcome
from specmeter.bench.load import LoadResult, summarise


@dataclass(frozen=True)
class Steady:
    """The requests begun when the last stream had begun (``full_ns``) and ended when the first ran out of work.

    ``ramp`` counts those begun before, ``ramp_down`` those of the others that were still under way after.
    """

    outcomes: tuple[Outcome, ...]
    ramp: int
    ramp_down: int
    began_ns: int
    ended_ns: int


def steady_part(outcomes: Sequence[Outcome], full_ns: int | None) -> Steady:
    """The steady part of a load; empty where the work ran out before the last stream began (``full_ns`` None)."""
    if full_ns is None or not outcomes:
        return Steady((), len(outcomes), 0, 0, 0)
    last_begun = max(outcome.send_ns for outcome in outcomes)
    # All streams take from one queue, so the first that ends after the last request was begun finds nothing more.
    ended_ns = min((outcome.end_ns for outcome in outcomes if outcome.end_ns > last_begun), default=last_begun)
    begun = [outcome for outcome in outcomes if outcome.send_ns >= full_ns]
    kept = tuple(outcome for outcome in begun if outcome.end_ns <= ended_ns)
    return Steady(kept, len(outcomes) - len(begun), len(begun) - len(kept), full_ns, max(ended_ns, full_ns))


def summarise_steady(result: LoadResult, part: Steady, ramp_s: float) -> dict[str, object]:
    """As ``summarise``, of the steady ``part`` alone, and how many requests were left out of it.

    ``requests`` and ``failed`` count all of them, ``wall_s`` is the steady part's. ``total_tok_s`` counts what arrived
    in it, of requests that reach beyond it too: each one's tokens by the share of its arrivals.
    """
    wall_s = (part.ended_ns - part.began_ns) / 1e9
    found = summarise(replace(result, outcomes=part.outcomes, wall_s=wall_s))
    tokens = sum(_within(outcome, part) for outcome in result.outcomes if not outcome.error)
    return {
        **found,
        "requests": len(result.outcomes),
        "failed": sum(1 for outcome in result.outcomes if outcome.error),
        "total_tok_s": tokens / wall_s if wall_s > 0 else None,
        "ramp_s": ramp_s,
        "left_out": {"ramp": part.ramp, "ramp_down": part.ramp_down},
    }


def _within(outcome: Outcome, part: Steady) -> float:
    """Output tokens of a request that arrived in the part, its arrivals taken to hold as many tokens each."""
    at = outcome.arrivals_ns
    if not at:
        return 0.0
    inside = bisect_right(at, part.ended_ns) - bisect_left(at, part.began_ns)
    return outcome.output_tokens * max(inside, 0) / len(at)
