"""Requests in flight: a first-in first-out queue and the one thread that drives the engine.

That thread is the one that loaded the model: OpenMP keeps a pool of workers for each thread that computes, and with two
pools on the same cores its workers stop spinning between operations (plain decoding: 36 instead of 50 tokens/s).
The event loop and this thread share Python's interpreter lock, so what passes between them is kept to one call a cycle
(``_hand_over``), and to none for a request that is not streamed until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specmeter.eagle.server_metrics import Counts, ServerCounts
from specmeter.eagle.server_requests import Request
from specmeter.eagle.server_text import StopMatcher
from specmeter.eagle.settings import Sampling, SpecSettings
from specmeter.eagle.tokenizer import StreamDecoder, Tokenizer
from specmeter.errors import SpecmeterError

log = logging.getLogger(__name__)

# An idle engine thread is back in Python this often: a debugger's call (`specmeter attach`) is run there, and a signal.
IDLE_WAIT_S = 0.5


class CycleLike(Protocol):
    """One engine cycle: the tokens it gained, drafts made and accepted, and why the request ended, if it did."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def finish(self) -> str | None: ...


class EngineLike(Protocol):
    """What the server needs of an engine."""

    @property
    def max_context(self) -> int: ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, spec: SpecSettings | None = None
    ) -> Iterator[CycleLike]: ...


@dataclass(frozen=True)
class Piece:
    """News of a request for the event loop: new text and token ids; at the end why it ended, or the error."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    error: str | None = None


class QueueFull(Exception):
    """As many requests wait as may."""


class Stopping(Exception):
    """The server is on its way down and takes no more requests."""


@dataclass(eq=False)
class Job:
    """A request in the queue or at work. ``cancelled`` may be set by the event loop at any time."""

    request: Request
    loop: asyncio.AbstractEventLoop
    tokenizer: Tokenizer
    news: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)
    counts: Counts = field(default_factory=Counts)
    token_ids: list[int] = field(default_factory=list)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer, self.request.skip_special_tokens)
        self._stops = StopMatcher(self.request.stop)
        self._said = ""
        self._per_cycle = self.request.stream or bool(self.request.stop)

    def detokenize(self, token_ids: Sequence[int], finish: str | None) -> Piece:
        """Take a cycle's tokens; returns the news: what is new for a stream, all of it at the end for another request.

        Text is made each cycle only if it is wanted then.
        """
        self.token_ids += token_ids
        if self._per_cycle:
            text = self._new_text(token_ids, finish)
        else:
            text = "" if finish is None else self.tokenizer.decode(self.token_ids, self.request.skip_special_tokens)
        if self._stops.matched:
            finish = "stop"
        if not self.request.stream:
            self._said += text
            text = self._said
        return Piece(text, tuple(token_ids), finish)

    def _new_text(self, token_ids: Sequence[int], finish: str | None) -> str:
        text = self._stops.push(self._decoder.push(token_ids))
        if finish is not None and not self._stops.matched:
            text += self._stops.push(self._decoder.finish()) + self._stops.finish()
        return text


class Dispatcher:
    """Owns the engine: takes jobs in the order they came, one at a time, on the thread that calls ``run``."""

    def __init__(self, engine: EngineLike, max_queue: int) -> None:
        self._engine = engine
        self._max_queue = max_queue
        self._waiting: deque[Job] = deque()
        self._wake = threading.Condition(threading.RLock())  # a signal handler may call ``stop`` while it is held
        self._stopping = False
        self._running: Job | None = None
        self.counts = ServerCounts()

    @property
    def alive(self) -> bool:
        """Whether requests are still served."""
        return not self._stopping

    @property
    def running(self) -> int:
        """Requests being decoded: 0 or 1."""
        return int(self._running is not None)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue. Raises QueueFull, or Stopping once ``stop`` was called."""
        with self._wake:
            if self._stopping:
                raise Stopping
            busy = self._running is not None or bool(self._waiting)
            if busy and len(self._waiting) >= self._max_queue:
                raise QueueFull
            self._waiting.append(job)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """The client is gone: a waiting job leaves the queue, a running one ends after its cycle."""
        job.cancelled = True
        with self._wake:
            if job in self._waiting:
                self._waiting.remove(job)
                self.counts.finish("cancelled")

    def stop(self) -> None:
        """End the running job after its cycle and drop the rest; returns at once."""
        with self._wake:
            self._stopping = True
            dropped = list(self._waiting)
            self._waiting.clear()
            if self._running is not None:
                self._running.cancelled = True
            self._wake.notify()
        for job in dropped:
            self._hand_over(job, Piece("", error="The server is stopping."))

    # -- in the engine thread -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve jobs until ``stop`` is called, from any thread or from a signal handler on this one."""
        while (job := self._next_job()) is not None:
            outcome = self._serve(job)
            with self._wake:
                self._running = None
                self.counts.finish(outcome)

    def _next_job(self) -> Job | None:
        with self._wake:
            while not (self._stopping or self._waiting):
                self._wake.wait(IDLE_WAIT_S)
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _serve(self, job: Job) -> str:
        """Decode one request to its end; returns the outcome that is counted."""
        try:
            cycles = self._engine.generate(job.request.prompt_ids, job.request.sampling, job.request.spec)
            try:
                self._start(job, next(cycles))
                while (finish := self._advance(job, cycles)) is None:
                    pass
                return finish
            finally:
                close = getattr(cycles, "close", None)
                if close is not None:
                    close()
        except _Ended as end:
            return end.outcome
        except SpecmeterError as error:
            self._hand_over(job, Piece("", error=f"{error.what} {error.why}".strip()))
        except Exception:
            log.exception("the engine failed in a request")
            self._hand_over(job, Piece("", error="The engine failed; the server's log has the traceback."))
        return "error"

    def _start(self, job: Job, first: CycleLike) -> None:
        """Take the token that the prompt's own forward gave. Raises _Ended if that was all."""
        steps = job.request.spec.speculative_num_steps
        for counts in (job.counts, self.counts.total):
            counts.start(len(job.request.prompt_ids), len(first.token_ids), steps)
        finish = self._pass_on(job, first)
        if finish is not None:
            raise _Ended(finish)

    def _advance(self, job: Job, cycles: Iterator[CycleLike]) -> str | None:
        """One decode cycle and what belongs to it; returns the outcome if it was the last."""
        cycle = next(cycles)
        self._count(job, cycle)
        return self._pass_on(job, cycle)

    def _count(self, job: Job, cycle: CycleLike) -> None:
        # The last cycle may be cut (token limit, stop token): the drafts that were accepted beyond it went to nobody.
        tokens = len(cycle.token_ids)
        delivered = min(cycle.accepted, tokens)
        for counts in (job.counts, self.counts.total):
            counts.add_cycle(tokens, cycle.drafted, delivered)

    def _pass_on(self, job: Job, cycle: CycleLike) -> str | None:
        if job.cancelled:
            self._hand_over(job, Piece("", error="The server is stopping." if self._stopping else "Cancelled."))
            return "cancelled"
        piece = job.detokenize(cycle.token_ids, cycle.finish)
        if piece.finish is not None or job.request.stream:
            self._hand_over(job, piece)
        return piece.finish

    def _hand_over(self, job: Job, piece: Piece) -> None:
        try:
            job.loop.call_soon_threadsafe(job.news.put_nowait, piece)
        except RuntimeError:
            job.cancelled = True  # the event loop has ended: nobody is left to tell


class _Ended(Exception):
    """The request ended with its first token."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome
