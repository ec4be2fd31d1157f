"""Servers: which engine a command starts, how it is started and stopped, its settings, flags and metrics."""

from __future__ import annotations

from specmeter.engines.access import shown_url
from specmeter.engines.base import Counters, Engine, ServerSpec, Setting
from specmeter.engines.embedded import EmbeddedEngine
from specmeter.engines.server import Server
from specmeter.engines.sglang import SglangEngine
from specmeter.engines.vllm import VllmEngine
from specmeter.errors import Exit, SpecmeterError

__all__ = [
    "ENGINE_NAMES",
    "Counters",
    "Engine",
    "Server",
    "ServerSpec",
    "Setting",
    "engine_named",
    "engine_of_metrics",
    "refuse_silent",
]

_ENGINES: dict[str, Engine] = {engine.name: engine for engine in (EmbeddedEngine(), VllmEngine(), SglangEngine())}
ENGINE_NAMES = tuple(_ENGINES)
_METRIC_PREFIXES = {"specmeter_": "embedded", "vllm:": "vllm", "sglang:": "sglang"}


def engine_named(name: str) -> Engine:
    """The engine of that name; raises SpecmeterError that lists the known ones."""
    if name not in _ENGINES:
        raise SpecmeterError(f"Unknown engine: {name}", f"Known engines are {', '.join(ENGINE_NAMES)}.")
    return _ENGINES[name]


def refuse_silent(server: Server) -> None:
    """Raise SpecmeterError (exit 4) with the reason if nothing answers as ``server``, which is closed."""
    try:
        why = server.why_silent()
    finally:
        server.stop()
    if why:
        raise SpecmeterError(
            f"Nothing answers at {shown_url(server.url)}.",
            why,
            "Give the server's address, such as http://127.0.0.1:8000, and check that it runs.",
            Exit.SERVER_FAILED,
        )


def engine_of_metrics(server: Server) -> str | None:
    """The engine's name, told by the names of the metrics of ``server``, which is closed; None if they do not tell."""
    try:
        text = server.metrics_text()
    finally:
        server.stop()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return next((name for prefix, name in _METRIC_PREFIXES.items() if any(x.startswith(prefix) for x in lines)), None)
