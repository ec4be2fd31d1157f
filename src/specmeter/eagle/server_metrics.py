"""Counters of the server and their Prometheus text. The engine thread writes them, the event loop reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Counts:
    """What a request, or the server since its start, has done.

    ``cycles`` counts decode iterations, the prompt's own forward not included; ``drafts`` those of them that drafted.
    ``accepted`` counts draft tokens that were accepted and delivered, without the bonus token: those that a request's
    end cut off (token limit, stop token) are left out. ``per_position[i]`` counts the cycles that delivered at least
    i + 1 drafts; it is as long as the deepest draft so far.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    cycles: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    def start(self, prompt_tokens: int, tokens: int, steps: int) -> None:
        """Count a request's prompt, what its forward gave, and make room for ``steps`` draft positions."""
        self.prompt_tokens += prompt_tokens
        self.tokens += tokens
        self.per_position += [0] * (steps - len(self.per_position))

    def add_cycle(self, tokens: int, drafted: int, accepted: int) -> None:
        """Count one decode cycle: the tokens it delivered, and how many of them were drafts."""
        self.tokens += tokens
        self.cycles += 1
        if drafted:
            self.drafts += 1
            self.drafted += drafted
            self.accepted += accepted
            for position in range(accepted):
                self.per_position[position] += 1


@dataclass
class ServerCounts:
    """Counters of all requests since the server started."""

    total: Counts = field(default_factory=Counts)
    finished: dict[str, int] = field(default_factory=dict)

    def finish(self, outcome: str) -> None:
        """Count a request that ended: stop, length, cancelled, error or rejected."""
        self.finished[outcome] = self.finished.get(outcome, 0) + 1


def render(counts: ServerCounts, running: int, waiting: int) -> str:
    """The Prometheus text exposition (format 0.0.4)."""
    total = counts.total
    lines = [
        *_metric("prompt_tokens_total", "counter", "Prompt tokens of served requests.", [("", total.prompt_tokens)]),
        *_metric("generated_tokens_total", "counter", "Tokens generated.", [("", total.tokens)]),
        *_metric("cycles_total", "counter", "Decode cycles, prefill not counted.", [("", total.cycles)]),
        *_metric("drafts_total", "counter", "Decode cycles that drafted.", [("", total.drafts)]),
        *_metric("draft_tokens_total", "counter", "Draft tokens verified.", [("", total.drafted)]),
        *_metric("accepted_tokens_total", "counter", "Draft tokens accepted and delivered.", [("", total.accepted)]),
        *_metric(
            "accepted_per_position_total",
            "counter",
            "Drafts accepted and delivered at each position, 0 the first.",
            [(f'{{position="{i}"}}', count) for i, count in enumerate(total.per_position)],
        ),
        *_metric(
            "requests_total",
            "counter",
            "Requests that ended, by outcome.",
            [(f'{{outcome="{name}"}}', count) for name, count in sorted(counts.finished.items())],
        ),
        *_metric("requests_running", "gauge", "Requests being decoded.", [("", running)]),
        *_metric("requests_waiting", "gauge", "Requests in the queue.", [("", waiting)]),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, samples: Iterable[tuple[str, int]]) -> list[str]:
    full = f"specmeter_{name}"
    return [f"# HELP {full} {text}", f"# TYPE {full} {kind}", *(f"{full}{label} {value}" for label, value in samples)]
