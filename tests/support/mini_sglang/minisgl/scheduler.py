"""The scheduler process: an endless loop that handles one batch's result while the next one runs."""

from __future__ import annotations

from collections import deque
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from typing import Any

from .workers import EagleWorker, Result, ServerArgs, TpModelWorker


class Scheduler:
    """One request a message: (tokens wanted, batch size); the answer is the tokens counted and their sum."""

    def __init__(self, pipe: Connection, v1: bool = False, args: ServerArgs | None = None) -> None:
        self.pipe = pipe
        self.tp_worker = TpModelWorker()
        self.draft_worker: Any
        if v1:  # each worker's module is imported only where it is used
            from .eagle_worker import EAGLEWorker

            self.draft_worker = EAGLEWorker(self.tp_worker)
        else:
            self.draft_worker = EagleWorker(self.tp_worker, args=args)
        self.result_queue: deque[Any] = deque()
        self.rows: list[int] = []
        self.left = 0
        self.sum = 0

    def event_loop_overlap(self) -> None:
        """Never returns while the server lives."""
        while True:
            if not self.rows and not self.receive():
                return
            batch = self.get_next_batch()
            if batch:
                self.result_queue.append(self.run_batch(batch))
            if len(self.result_queue) > 1 or (self.result_queue and not batch):
                self.process_batch_result(self.result_queue.popleft())

    def event_loop_normal(self) -> None:
        """Never returns either; no batch is under way while a result is handled."""
        while True:
            if not self.rows and not self.receive():
                return
            self.process_batch_result(self.run_batch(self.get_next_batch()))

    def receive(self) -> bool:
        """Wait for a request; False at the end."""
        wanted, batch = self.pipe.recv()
        self.left, self.rows, self.sum = wanted, [0] * batch, 0
        return bool(wanted)

    def get_next_batch(self) -> list[int]:
        """The rows of the next cycle, none when enough are under way."""
        return self.rows if self.left - len(self.result_queue) > 0 else []

    def run_batch(self, batch: list[int]) -> Result:
        """One cycle."""
        result: Result = self.draft_worker.forward_batch_generation(batch)
        return result

    def process_batch_result(self, result: Result) -> None:
        """Count the tokens; answer at the request's end."""
        self.left -= 1
        self.sum += sum(result.tokens) + sum(result.accepted)
        if self.left == 0:
            self.pipe.send(self.sum)
            self.rows = []
            self.result_queue.clear()


def run_scheduler_process(pipe: Connection, v1: bool = False, args: ServerArgs | None = None) -> None:
    """The spawned process's main function; loads plugins first, as the engine does."""
    for plugin in entry_points(group="sglang.srt.plugins"):
        plugin.load()()
    if args is not None and args.torch:  # so that its profiler can be asked for
        __import__("torch").set_num_threads(1)
    scheduler = Scheduler(pipe, v1, args)
    if v1:
        scheduler.event_loop_normal()
    else:
        scheduler.event_loop_overlap()
