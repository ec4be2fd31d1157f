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


class AdaptiveSlot:
    """The step count of a range of batch sizes; the engine's own average never moves it here."""

    def __init__(self, candidates: list[int], steps: int) -> None:
        self.candidate_steps = candidates
        self.current_steps = steps


class AdaptiveParams:
    """Batch size to slot."""

    def __init__(self, candidates: list[int], steps: int) -> None:
        self._slots = {1: AdaptiveSlot(candidates, steps)}

    def get_steps_for_batch(self, size: int) -> int:
        """The step count for that many rows."""
        return self._slots[max(key for key in self._slots if key <= size)].current_steps


class AdaptiveController:
    """Puts what was built for a step count in place; only candidates were built."""

    def __init__(self, worker: EagleWorker, candidates: list[int]) -> None:
        self.worker = worker
        self.params = AdaptiveParams(candidates, worker.steps)
        self._states = {steps: steps for steps in candidates}

    def activate_step_by_batch(self, size: int) -> None:
        """Switch if the slot asks for another count."""
        target = self.params.get_steps_for_batch(size)
        if target != self.worker.steps:
            self.worker.steps = self._states[target]


@dataclass
class ServerArgs:
    """What the server was started with."""

    tp_size: int = 1
    candidates: tuple[int, ...] = ()
    torch: bool = False


class EagleWorker:
    """Draft, verify, extend."""

    def __init__(self, target_worker: TpModelWorker, steps: int = 3, args: ServerArgs | None = None) -> None:
        self.server_args = args or ServerArgs()
        self.target_worker = target_worker
        self.draft_runner = ModelRunner(200)
        self.steps = steps
        self.turn = 0
        candidates = list(self.server_args.candidates)
        self.adaptive_controller = AdaptiveController(self, candidates) if candidates else None

    @inference_mode
    def forward_batch_generation(self, rows: list[int]) -> Result:
        """One speculative cycle."""
        self.activate_step_by_batch(len(rows))
        drafts = self.draft(rows)
        result = self.verify(rows, drafts)
        self.draft_extend(result.tokens)
        return result

    def activate_step_by_batch(self, size: int) -> None:
        """The step count of the coming cycle."""
        if self.adaptive_controller is not None:
            self.adaptive_controller.activate_step_by_batch(size)

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
        """Accepted drafts of each request: 0, 1, 2 in turn, with three steps."""
        self.turn += 1
        return [self.turn % max(self.steps, 1) for _ in logits]

    def draft_extend(self, rows: list[int]) -> list[int]:
        """The draft over what was accepted."""
        return self.draft_runner.forward(rows)
