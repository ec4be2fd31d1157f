"""The real HTTP server over an engine that plays a script, for tests of everything but the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from specmeter.eagle.server import FrontThread, bind
from specmeter.eagle.server_http import Service
from specmeter.eagle.server_jobs import Dispatcher
from specmeter.eagle.server_requests import Limits
from specmeter.eagle.settings import Sampling, SpecSettings
from specmeter.eagle.tokenizer import Tokenizer

CONTEXT = 64


@dataclass(frozen=True)
class ScriptedCycle:
    """A cycle with what the engine's own has."""

    token_ids: list[int]
    drafted: int = 0
    accepted: int = 0
    finish: str | None = None


@dataclass
class ScriptedEngine:
    """Plays ``script`` for every request, ``pause_s`` a cycle. ``gate`` cleared holds it before all but the first."""

    script: list[ScriptedCycle]
    max_context: int = CONTEXT
    gate: threading.Event = field(default_factory=threading.Event)
    seen: list[tuple[list[int], Sampling, SpecSettings | None]] = field(default_factory=list)
    closed: int = 0
    failure: Exception | None = None
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        self.gate.set()

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, spec: SpecSettings | None = None
    ) -> Iterator[ScriptedCycle]:
        """One cycle after the other."""
        self.seen.append((list(prompt_ids), sampling, spec))
        try:
            for place, cycle in enumerate(self.script):
                if place:
                    self.gate.wait(100)
                    time.sleep(self.pause_s)
                if self.failure is not None:
                    raise self.failure
                plain = spec is None or spec.speculative_num_steps == 0
                yield replace(cycle, drafted=0, accepted=0) if plain else cycle
        finally:
            self.closed += 1


@contextmanager
def scripted_server(
    engine: ScriptedEngine, tokenizer: Tokenizer, max_queue: int = 4, has_draft: bool = True
) -> Iterator[str]:
    """The base URL of a server on a free port; ended and joined at exit."""
    limits = Limits("tiny", engine.max_context, 64, SpecSettings(2 if has_draft else 0), has_draft)
    service = Service(Dispatcher(engine, max_queue), tokenizer, limits, created=1)
    listener, ready, urls = bind("127.0.0.1", 0), threading.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    front = FrontThread(service, listener, on_ready)
    engine_thread = threading.Thread(target=service.dispatcher.run, daemon=True)
    front.start()
    engine_thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        engine.gate.set()
        front.stop()
        front.join()
        engine_thread.join(60)
        listener.close()
        assert not engine_thread.is_alive() and not service.dispatcher.alive and front.failure is None


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll until ``condition`` holds; AssertionError if it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
