"""The older form of the speculative worker: it is a target worker itself, with the draft's runner, and holds one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .graph_runner import ModelRunner
from .workers import Result, TpModelWorker, inference_mode


class EAGLEWorker(TpModelWorker):
    """Draft, verify, extend: the draft's runner is ``model_runner`` of the class below."""

    def __init__(self, target_worker: TpModelWorker, steps: int = 3) -> None:
        super().__init__()
        self.target_worker = target_worker
        self.steps = steps
        self.turn = 0
        with self.draft_tp_context():
            self.model_runner = ModelRunner(200)

    @property
    def draft_model_runner(self) -> ModelRunner:
        """The runner under another name, as the engine has it."""
        return self.model_runner

    @contextmanager
    def draft_tp_context(self) -> Iterator[None]:
        """The draft's own group of ranks."""
        yield

    @inference_mode
    def forward_batch_generation(self, rows: list[int]) -> Result:
        """One speculative cycle."""
        with self.draft_tp_context():
            drafts = self.draft(rows)
        result = self.verify(rows, drafts)
        with self.draft_tp_context():
            self.forward_draft_extend_after_decode(result.tokens)
        return result

    def draft(self, rows: list[int]) -> list[list[int]]:
        """The draft's steps after the first, one forward a step but for the last."""
        drafts: list[list[int]] = []
        for step in range(self.steps):
            drafts.append(rows)
            if step == self.steps - 1:
                break
            rows = self.draft_model_runner.forward(rows)
        return drafts

    def verify(self, rows: list[int], drafts: list[list[int]]) -> Result:
        """The target over the drafts, and how many it accepts."""
        logits = self.target_worker.forward_batch_generation(rows)
        self.turn += 1
        return Result(logits, self.accept(logits))

    def accept(self, logits: list[int]) -> list[int]:
        """Accepted drafts of each request: 0, 1, 2 in turn."""
        return [self.turn % self.steps for _ in logits]

    def forward_draft_extend_after_decode(self, rows: list[int]) -> list[int]:
        """The draft over what was accepted."""
        return self.draft_model_runner.forward(rows)
