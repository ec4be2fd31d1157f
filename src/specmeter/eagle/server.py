"""Starting and stopping the embedded engine's server."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from specmeter.eagle.settings import SpecSettings
from specmeter.errors import Exit, SpecmeterError

if TYPE_CHECKING:
    from specmeter.eagle.server_http import Service

GRACE_S = 2
MAX_PORT = 65535


@dataclass(frozen=True)
class ServeOptions:
    """What to serve and where. ``draft_dir`` None serves without a head; ``spec`` is used where a request says none."""

    model_dir: Path
    draft_dir: Path | None
    spec: SpecSettings
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    draft_int8: bool = False
    device: str = "cpu"
    huge_pages: bool = True
    threads: int | None = None
    max_context: int = 4096
    max_queue: int = 64


def serve(options: ServeOptions, on_ready: Callable[[str, str], None]) -> Exit:
    """Load the engine, serve until SIGINT or SIGTERM, and return the exit code.

    ``on_ready`` is called with the base URL and where the weights lie once requests are taken. Must run on
    the main thread, which becomes the engine's. Raises SpecmeterError if the port is taken, a directory cannot be
    used, or the head does not fit.
    """
    # The port first: nobody should wait for a model to load and then hear that it was in vain.
    listener = bind(options.host, options.port)
    try:
        service = load_service(options)
        front = FrontThread(service, listener, lambda url: on_ready(url, service.memory))
        stopped_by: list[int] = []

        def on_signal(number: int, frame: FrameType | None) -> None:
            front.stop(at_once=bool(stopped_by))
            stopped_by.append(number)

        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            front.start()
            service.dispatcher.run()
        finally:
            front.stop()
            front.join()
            for number, handler in previous.items():
                signal.signal(number, handler)
    finally:
        listener.close()
    if front.failure is not None:
        raise _bind_error(options.host, options.port, front.failure) from front.failure
    return Exit.INTERRUPTED if stopped_by[:1] == [signal.SIGINT] else Exit.DONE


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises SpecmeterError if host or port cannot be used."""
    if not 0 <= port <= MAX_PORT:
        # getaddrinfo takes the number modulo 65536 and would listen somewhere else.
        raise SpecmeterError(f"Cannot listen on port {port}.", f"Ports run from 0 to {MAX_PORT}.", "Choose another.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _bind_error(host, port, error) from error
    try:
        # Without it a restart would have to wait for the last run's connections to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    return listener


def _bind_error(host: str, port: int, error: OSError) -> SpecmeterError:
    taken = error.errno == errno.EADDRINUSE
    why = "Another process listens there." if taken else str(error)
    return SpecmeterError(f"Cannot listen on {host} port {port}.", why, "Choose another with --host and --port.")


def load_service(options: ServeOptions) -> Service:
    """Engine, tokenizer and limits from the directories. Raises SpecmeterError if one cannot be used."""
    from specmeter.eagle.config import LlamaConfig
    from specmeter.eagle.engine import Engine
    from specmeter.eagle.server_http import Service
    from specmeter.eagle.server_jobs import Dispatcher
    from specmeter.eagle.server_requests import Limits
    from specmeter.eagle.tokenizer import Tokenizer

    tokenizer = Tokenizer(options.model_dir)
    # Before the engine allocates for every position: beyond what the model was trained for there is nothing to serve.
    trained = LlamaConfig.from_dir(options.model_dir).max_position_embeddings
    engine = Engine.load(
        options.model_dir,
        options.draft_dir,
        dtype=options.dtype,
        draft_int8=options.draft_int8,
        device=options.device,
        huge_pages=options.huge_pages,
        threads=options.threads,
        max_context=min(options.max_context, trained),
    )
    limits = Limits(
        model=options.model_dir.name,
        max_context=engine.max_context,
        vocab_size=engine.target.config.vocab_size,
        spec=options.spec,
        has_draft=engine.draft is not None,
    )
    memory = str(engine.huge_pages) if options.huge_pages and engine.target.layout.device.type == "cpu" else ""
    return Service(Dispatcher(engine, options.max_queue), tokenizer, limits, int(time.time()), memory)


class FrontThread:
    """The HTTP side on a thread of its own, with its event loop."""

    def __init__(self, service: Service, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
        from specmeter.eagle.server_http import make_app

        config = uvicorn.Config(
            make_app(service), lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S
        )
        self._server = _AnnouncingServer(config, lambda: on_ready(base_url(listener)))
        self._dispatcher = service.dispatcher
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.failure: OSError | None = None

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def stop(self, at_once: bool = False) -> None:
        """Take no more requests and end those at work; ``at_once`` does not wait for clients to read their answers."""
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or at_once
        self._dispatcher.stop()

    def join(self) -> None:
        """Wait for the thread to end after ``stop``."""
        if self._thread.ident is not None:
            self._thread.join(GRACE_S + 1)

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except OSError as error:
            self.failure = error
        finally:
            # Without its HTTP side the dispatcher would wait for ever.
            self._dispatcher.stop()


class _AnnouncingServer(uvicorn.Server):
    """uvicorn, which says when it takes requests."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then the announcement."""
        await super().startup(sockets=sockets)
        if self.started:
            self._announce()


def base_url(listener: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
