"""What a server made of its arguments: as it tells them, as its log prints them, and its processes' variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specmeter.bench.place import HERE, Place
from specmeter.engines import Server
from specmeter.engines.flags import Command
from specmeter.trace.masking import mask_command, mask_env

MAX_LOG_BYTES = 4 * 1024 * 1024
MAX_VALUE = 200
# vLLM's engine prints its whole configuration after this, SGLang its arguments.
_SHORT = re.compile("-[A-Za-z]")
_LOGGED = re.compile(r"(?:LLM engine \([^)]*\) with config: |server_args=ServerArgs\()(.*)")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
# These differ from start to start and say nothing about the setting.
_VOLATILE = re.compile(
    r"(^|\.)(host|port|nccl_port|pid|random_seed|uptime\w*|start_time|served_model_name|api_key|admin_api_key|"
    r"internal_states|instance_id|engine_id|dist_init_addr|\w*_port)$"
)


def resolved_arguments(
    server: Server, command: Command, variables: Iterable[str] = (), place: Place = HERE
) -> dict[str, str]:
    """Name -> value as text: flags of the command, over them what the engine resolved, and ``env.NAME`` variables.

    ``variables`` are looked up in the server's processes, so one that an engine rewrites before it starts its workers
    shows the workers' value. The volatile ones (ports, process ids) are left out and secrets masked.
    """
    found = {f"flag.{name}": value for name, value in command_flags(mask_command(command)).items()}
    found |= _flat(server.flags())
    if server.process is not None:
        found |= logged_arguments(_head(server.process.log_path))
        wanted = tuple(variables)
        there = place.variables(server.process.pid, wanted)
        found |= {f"env.{name}": there.get(name, "(not set)") for name in wanted}
    kept = {name: value[:MAX_VALUE] for name, value in found.items() if not _VOLATILE.search(name)}
    return mask_env(kept)


def command_flags(command: Sequence[str]) -> dict[str, str]:
    """The flags of a command line and their values as written; a switch has the value ``on``.

    Short ones count from the first ``--flag`` on: what stands before that is the interpreter's.
    """
    found: dict[str, str] = {}
    name = ""
    for word in command:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else "on"
        elif found and _SHORT.match(word):
            name = word[1:]
            found[name] = "on"
        elif name:
            found[name] = word if found[name] == "on" else f"{found[name]} {word}"
    return found


def logged_arguments(text: str) -> dict[str, str]:
    """The ``key=value`` list of the first configuration line of a log; nothing of it is evaluated."""
    found = _LOGGED.search(text)
    return dict(_pairs(found.group(1))) if found else {}


def _pairs(text: str) -> list[tuple[str, str]]:
    """Splits ``a=1, b=C(d=2, e='x, y'), f={..}`` at its outer commas."""
    parts: list[str] = []
    depth, quote, current = 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                break
        elif char == "," and depth == 0:
            parts.append(current)
            current = ""
            continue
        current += char
    pairs = [part.strip().partition("=") for part in [*parts, current]]
    return [(name, value.strip("'\"")) for name, equals, value in pairs if equals and _KEY.fullmatch(name)]


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif not _VOLATILE.search(name) and isinstance(value, str | int | float | bool | None | list):
            found[f"{prefix}{name}"] = str(value)
    return found


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def differences(sides: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """The arguments that are not the same on all sides: ``{"argument", "values": {side: text or None}}``."""
    names = sorted({name for arguments in sides.values() for name in arguments})
    rows = [{"argument": n, "values": {side: args.get(n) for side, args in sides.items()}} for n in names]
    return [row for row in rows if len(set(row["values"].values())) > 1]  # type: ignore[attr-defined]
