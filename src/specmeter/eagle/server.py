"""Starting and stopping the embedded engine's server."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from collections.abc import Callable, Sequence
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
    threads: int | None = None
    max_context: int = 4096
    max_queue: int = 64


def serve(options: ServeOptions, on_ready: Callable[[str], None]) -> Exit:
    """Load the engine, serve until SIGINT or SIGTERM, and return the exit code.

    ``on_ready`` is called with the base URL once requests are taken. Raises SpecmeterError if the port is taken, a
    directory cannot be used, or the head does not fit the model.
    """
    # The port first: nobody should wait for a model to load and then hear that it was in vain.
    listener = bind(options.host, options.port)
    try:
        service = load_service(options)
        server = Server(service, listener, on_ready)
        service.engine.start()
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except OSError as error:
            raise _bind_error(options.host, options.port, error) from error
        finally:
            service.engine.stop()
            service.engine.join(GRACE_S)
    finally:
        listener.close()
    return Exit.INTERRUPTED if server.stopped_by == signal.SIGINT else Exit.DONE


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
    from specmeter.eagle.engine import Engine
    from specmeter.eagle.server_http import Service
    from specmeter.eagle.server_jobs import EngineThread
    from specmeter.eagle.server_requests import Limits
    from specmeter.eagle.tokenizer import Tokenizer

    tokenizer = Tokenizer(options.model_dir)
    engine = Engine.load(
        options.model_dir,
        options.draft_dir,
        dtype=options.dtype,
        threads=options.threads,
        max_context=options.max_context,
    )
    limits = Limits(
        model=options.model_dir.name,
        max_context=engine.max_context,
        vocab_size=engine.target.config.vocab_size,
        spec=options.spec,
        has_draft=engine.draft is not None,
    )
    return Service(EngineThread(engine, options.max_queue), tokenizer, limits, int(time.time()))


class Server(uvicorn.Server):
    """uvicorn, told to stop by a signal once, and to take the engine down with it."""

    def __init__(self, service: Service, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
        from specmeter.eagle.server_http import make_app

        app = make_app(service)
        super().__init__(
            uvicorn.Config(
                app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S
            )
        )
        self.stopped_by: int | None = None
        self._service = service
        self._listener = listener
        self._on_ready = on_ready

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(sockets=list(sockets or ()))
        if self.started:
            self._on_ready(base_url(self._listener))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal stops the engine and the connections, a second one does not wait for them."""
        self.force_exit = self.stopped_by is not None
        self.should_exit = True
        self.stopped_by = sig
        self._service.engine.stop()


def base_url(listener: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
