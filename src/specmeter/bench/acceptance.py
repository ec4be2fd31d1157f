"""Accept lengths of a load: overall and by position from the counters, by kind and context from the answers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from specmeter.bench.client import Outcome
from specmeter.engines.base import Counters

# Where a context begins to count as longer, tokens; a request's context is its prompt and half of its answer.
CONTEXTS = (0, 128, 512, 2048, 8192, 32768)


def acceptance(outcomes: Sequence[Outcome], counted: Counters) -> dict[str, object]:
    """Keys of a bench level. Lengths are tokens a cycle, bonus included; None or empty where nothing tells them.

    ``counted`` is what the engine's counters rose by: all of its traffic meanwhile. ``accept_by_position[i]`` is the
    share of cycles that accepted the draft at position i + 1. Kinds and contexts rest on the counts that come with each
    answer (the embedded engine's usage; SGLang's ``/generate`` tells cycles, and its first token takes none).
    """
    own = [outcome for outcome in outcomes if not outcome.error and outcome.cycles]
    positions = counted.per_position if counted.cycles else ()
    overall = counted.mean_accept_length
    return {
        "accept_length_tokens": overall if overall is not None else _length(own),
        "accept_by_position": [accepted / (counted.cycles or 1) for accepted in positions],
        "accept_by_kind": _by(own, lambda outcome: outcome.call.prompt.kind),
        "accept_by_context": _by(own, _context),
    }


def _by(outcomes: Sequence[Outcome], group: Callable[[Outcome], str]) -> dict[str, float | None]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(group(outcome), []).append(outcome)
    return {name: _length(groups[name]) for name in sorted(groups, key=lambda name: (len(name), name))}


def _length(outcomes: Sequence[Outcome]) -> float | None:
    """1 + accepted / cycles over all of the cycles; where only cycles are told, tokens after the first over cycles."""
    cycles = sum(outcome.cycles or 0 for outcome in outcomes)
    if not cycles:
        return None
    if all(outcome.accepted is not None for outcome in outcomes):
        return 1.0 + sum(outcome.accepted or 0 for outcome in outcomes) / cycles
    return sum(max(outcome.output_tokens - 1, 0) for outcome in outcomes) / cycles


def _context(outcome: Outcome) -> str:
    at = bisect_right(CONTEXTS, outcome.prompt_tokens + outcome.output_tokens // 2) - 1
    return f"{CONTEXTS[at]}-{CONTEXTS[at + 1] - 1}" if at + 1 < len(CONTEXTS) else f"{CONTEXTS[at]}-"
