"""The target's worker, and the speculative worker that holds it and a draft runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from .graph_runner import ModelRunner


def inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator around methods, as torch's is."""

    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


@dataclass
class Result:
    """What one cycle gives: tokens and accepted drafts of each request."""

    tokens: list[int]
    accepted: list[int]


class TpModelWorker:
    """The target."""

    def __init__(self) -> None:
        self.model_runner = ModelRunner(3000)

    def forward_batch_generation(self, rows: list[int]) -> list[int]:
        """One forward of the target."""
        return self.model_runner.forward(rows)


class EagleWorker:
    """Draft, verify, extend."""

    def __init__(self, target_worker: TpModelWorker, steps: int = 3) -> None:
        self.target_worker = target_worker
        self.draft_runner = ModelRunner(200)
        self.steps = steps
        self.turn = 0

    @inference_mode
    def forward_batch_generation(self, rows: list[int]) -> Result:
        """One speculative cycle."""
        drafts = self.draft(rows)
        result = self.verify(rows, drafts)
        self.draft_extend(result.tokens)
        return result

    def draft(self, rows: list[int]) -> list[list[int]]:
        """The draft's steps after the first."""
        drafts = []
        for _step in range(self.steps - 1):
            rows = self.draft_runner.forward(rows)
            drafts.append(rows)
        return drafts

    def verify(self, rows: list[int], drafts: list[list[int]]) -> Result:
        """The target over the drafts, and how many it accepts."""
        logits = self.target_worker.forward_batch_generation(rows)
        accepted = self.accept(logits, drafts)
        return Result(logits, accepted)

    def accept(self, logits: list[int], drafts: list[list[int]]) -> list[int]:
        """Accepted drafts of each request: 0, 1, 2 in turn."""
        self.turn += 1
        return [self.turn % self.steps for _ in logits]

    def draft_extend(self, rows: list[int]) -> list[int]:
        """The draft over what was accepted."""
        return self.draft_runner.forward(rows)
