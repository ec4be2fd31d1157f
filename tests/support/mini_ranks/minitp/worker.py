"""The speculative worker of one rank: draft, verify, extend, with collectives in the draft and in each layer."""

from __future__ import annotations

import time

from .group import Group

LAYERS, STEPS = 3, 3


def work(seconds: float) -> None:
    """A device's work: the host's processor is free meanwhile, also for the client on a small machine."""
    time.sleep(seconds)


class Worker:
    """Rank ``slow`` takes twice as long in verify's layers."""

    def __init__(self, rank: int, group: Group, steps: int, slow: int) -> None:
        self.rank, self.group, self.steps, self.turn = rank, group, steps, 0
        self.layer_s = 2e-4 if rank == slow else 1e-4

    def forward_batch_generation(self, rows: list[int]) -> list[int]:
        """One cycle: the tokens that each request gains."""
        if self.steps:
            rows = self.draft(rows)
        logits = self.verify(rows)
        accepted = self.accept(logits)
        return [1 + count for count in accepted]

    def draft(self, rows: list[int]) -> list[int]:
        """The steps after the first."""
        for _step in range(self.steps - 1):
            rows = self.draft_forward(rows)
        return rows

    def draft_forward(self, rows: list[int]) -> list[int]:
        """One step, one collective."""
        work(3e-5)
        return self.group.all_reduce(rows)

    def verify(self, rows: list[int]) -> list[int]:
        """The target's forward."""
        return self.forward(rows)

    def forward(self, rows: list[int]) -> list[int]:
        """Layer by layer."""
        for _layer in range(LAYERS):
            work(self.layer_s)
            rows = self.group.all_reduce(rows)
        return rows

    def accept(self, logits: list[int]) -> list[int]:
        """Accepted drafts of each request: 0, 1, 2 in turn with three steps."""
        self.turn += 1
        return [self.turn % max(self.steps, 1) for _ in logits]
