"""One rank's process: an endless loop over what rank 0 hands to all."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from .group import Group
from .worker import Worker


class Scheduler:
    """Counts the tokens of a request and answers at its end; rank 0 sends each request on to the others."""

    def __init__(self, pipe: Connection, others: list[Connection], worker: Worker) -> None:
        self.pipe, self.others, self.worker = pipe, others, worker

    def event_loop(self) -> None:
        """Never returns while the server lives."""
        while True:
            tokens, batch = self.pipe.recv()
            for other in self.others:
                other.send((tokens, batch))
            done = 0
            while done < tokens:
                done += self.run_batch([0] * batch)[0]
            self.pipe.send(done)

    def run_batch(self, rows: list[int]) -> list[int]:
        """One cycle."""
        return self.worker.forward_batch_generation(rows)


def run_rank(
    rank: int, pipe: Connection, others: list[Connection], barrier: Barrier | None, steps: int, slow: int
) -> None:
    """The spawned process's main function."""
    Scheduler(pipe, others, Worker(rank, Group(barrier), steps, slow)).event_loop()
