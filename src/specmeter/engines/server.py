"""A server that answers: started by us and stopped surely, or somebody else's and left alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import httpx

from specmeter.engines.access import key_headers, listening_host, shown_url, url_of
from specmeter.engines.base import Counters, Engine, ServerSpec
from specmeter.engines.process import ServerProcess, free_port, port_is_taken
from specmeter.errors import Exit, SpecmeterError

Progress = Callable[[str], None]
POLL_S = 0.1
ANSWER_S = 5.0
# Answers of a server that has no /health for us. 503 is not among them: such a server is not ready.
_NO_HEALTH = (401, 403, 404, 405, 501)


def _silent(text: str) -> None:
    pass


class Server:
    """A running server: its base ``url``, its ``engine`` (None if unknown) and, if we started it, its ``process``.

    Use it in a ``with`` block: a started server is stopped at the end of the block in every case.
    """

    def __init__(
        self,
        url: str,
        engine: Engine | None = None,
        process: ServerProcess | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``transport`` carries the requests to a server that only another host reaches; None: straight from here."""
        self.url = url
        self.engine = engine
        self.process = process
        self.headers: dict[str, str] = {}
        # Never through a proxy: the environment's proxies are for the outside, and would see prompts and keys.
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, transport=transport)

    def use_key(self, spec: ServerSpec) -> None:
        """Send the key that ``spec`` names with every request, these and those of the load. Raises SpecmeterError."""
        self.headers = key_headers(spec)
        self._http.headers.update(self.headers)

    @classmethod
    def start(
        cls,
        engine: Engine,
        spec: ServerSpec,
        log_path: Path,
        *,
        extra_env: Mapping[str, str] | None = None,
        progress: Progress = _silent,
        timeout_s: float | None = None,
    ) -> Server:
        """Start ``spec.command`` and wait until it is healthy.

        The environment is ours, then ``spec.env``, then ``extra_env``. A port that the command states is used if it is
        free; else a free one is added. Raises SpecmeterError (exit 4, with the log's cause) if the server ends early or
        is not healthy in ``timeout_s``; nothing is left running then.
        """
        command, port = _with_port(engine, spec.command)
        env = {**os.environ, **spec.env, **(extra_env or {})}
        process = ServerProcess(command, env, log_path)
        server = cls(url_of(listening_host(command), port), engine, process)
        try:
            server.use_key(spec)
            server.wait_healthy(timeout_s or engine.default_start_timeout_s(), progress)
        except BaseException:
            server.stop()
            raise
        return server

    def wait_healthy(self, timeout_s: float, progress: Progress = _silent) -> None:
        """Poll until it is ``healthy``; raises SpecmeterError (exit 4) on early death or time-out."""
        began = time.monotonic()
        said = began
        while True:
            self.check_alive("The server ended before it was ready.")
            if self.healthy():
                return
            now = time.monotonic()
            if now - began > timeout_s:
                raise self._timed_out(timeout_s)
            if self.process is not None and now - said >= 1.0:
                said = now
                last = self.process.last_line()
                progress(f"waiting for the server, {now - began:.0f} s" + (f": {last[:100]}" if last else ""))
            time.sleep(POLL_S)

    def _timed_out(self, timeout_s: float) -> SpecmeterError:
        what = f"The server at {shown_url(self.url)} was not healthy after {timeout_s:.0f} s."
        if self.process is not None:
            return self.process.failure(what)
        why = self.why_silent() or "Something answers there, but neither /health nor /v1/models says that it is ready."
        return SpecmeterError(what, why, "Check the URL, and that the server runs.", Exit.SERVER_FAILED)

    def why_silent(self) -> str:
        """Why nothing answers at the URL, or empty if something does, whatever it says."""
        try:
            self._http.get("/health")
        except httpx.TimeoutException:
            return f"No answer within {ANSWER_S:.0f} s."
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{str(error) or type(error).__name__}."
        return ""

    def healthy(self) -> bool:
        """True if ``/health`` answers 200 now; where a server has no such path (or guards it), ``/v1/models``."""
        try:
            status = self._http.get("/health").status_code
            return status == 200 or (status in _NO_HEALTH and self._http.get("/v1/models").status_code == 200)
        except httpx.HTTPError:
            return False

    def check_alive(self, what: str = "The server ended while it was in use.") -> None:
        """Raise SpecmeterError (exit 4, with the log's cause) if our server has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise self.process.failure(what)

    def model_name(self, wanted: str | None = None) -> str:
        """The served model's name; raises SpecmeterError naming the served ones if ``wanted`` is not among them."""
        try:
            answer = self._http.get("/v1/models")
            names = [str(entry["id"]) for entry in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError):
            # A server without the list (or SGLang's bare /generate) takes any name.
            return wanted or "default"
        if wanted is None and names:
            return names[0]
        if wanted is not None and wanted not in names:
            raise SpecmeterError(
                f"The server does not serve a model named {wanted}.",
                f"It serves: {', '.join(names) or 'none'}.",
                "Give one of these as --model-name, or leave it out.",
            )
        return wanted or "default"

    def flags(self) -> dict[str, object]:
        """The flags as the engine resolved them, empty where it does not tell."""
        path = self.engine.info_path() if self.engine is not None else None
        if path is None:
            return {}
        try:
            document = self._http.get(path).json()
        except (httpx.HTTPError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def metrics(self) -> Counters:
        """The engine's counters now; all None where it does not tell."""
        if self.engine is None:
            return Counters()
        return self.engine.counters(self.metrics_text(), self.flags())

    def metrics_text(self) -> str:
        """What ``/metrics`` answers, empty if it does not."""
        try:
            answer = self._http.get("/metrics")
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == 200 else ""

    def stop(self) -> None:
        """Stop the server if we started it; in any case close our connections. May be called twice."""
        try:
            if self.process is not None:
                self.process.stop()
        finally:
            self._http.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _with_port(engine: Engine, command: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    stated = engine.command_port(command)
    if stated is None:
        port = free_port()
        return engine.with_port(command, port), port
    if port_is_taken(stated, listening_host(command)):
        raise SpecmeterError(
            f"Port {stated} is taken: something listens on it already.",
            "The command asks for this port.",
            "Stop what uses it, or leave --port out: specmeter then picks a free one.",
            Exit.SERVER_FAILED,
        )
    return command, stated
