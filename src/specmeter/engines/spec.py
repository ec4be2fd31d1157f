"""The one grammar that names a server: ``-- CMD``, ``--url U``, ``--link ID``, or a TOML file's ``[server.NAME]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from specmeter.engines import ENGINE_NAMES
from specmeter.engines.access import key_headers, shown_url
from specmeter.engines.base import ServerSpec
from specmeter.errors import SpecmeterError
from specmeter.trace.masking import mask_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Names (of any script), IPv4 and IPv6 addresses; what is left out here is never part of one.
_HOST = re.compile(r"[^\s/\\<>\"'`{}|^\[\]@?#,;!*()]+")
# Numbers as --steps and --concurrency take them, a comma at the end too.
_LISTED = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9-]*)*")
_TEXTS = {
    "url": 'Write url = "http://127.0.0.1:8000"',
    "link": 'Write link = "ID", as `specmeter run` prints it.',
    "api_key_env": 'Write api_key_env = "NAME", a variable that holds the key.',
    "engine": f'Write engine = "NAME"; known are {", ".join(ENGINE_NAMES)}.',
}
_KEYS = {"engine", "command", "env", "url", "link", "settings", "api_key_env"}


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server grammar to a command's parser."""
    group = parser.add_argument_group("the server (default: the embedded engine with the packaged head)")
    group.add_argument("--url", metavar="U", help="a running server, for example http://127.0.0.1:8000")
    group.add_argument("--link", metavar="ID", help="a server started by `specmeter run`")
    group.add_argument("--server", metavar="FILE[:NAME]", help="a TOML file with a [server.NAME] table")
    group.add_argument("--engine", metavar="NAME", help=f"say which engine it is: {', '.join(ENGINE_NAMES)}")
    group.add_argument("--model-name", metavar="NAME", help="the served model's name, where a server has several")
    group.add_argument("--api-key-env", metavar="NAME", help="the variable that holds the server's API key")
    group.add_argument("server_command", nargs="*", metavar="-- CMD", help="the command that starts the server")


def server_spec(args: argparse.Namespace, default: Sequence[str] = ()) -> ServerSpec:
    """The server that parsed arguments name; ``default`` is the command if they name none.

    Raises SpecmeterError if they name several, something unreadable, or a variable without a key.
    """
    spec = _named(args, default)
    if getattr(args, "api_key_env", None):
        spec = replace(spec, api_key_env=args.api_key_env)
    key_headers(spec)
    return spec


def _named(args: argparse.Namespace, default: Sequence[str]) -> ServerSpec:
    command = tuple(word for index, word in enumerate(args.server_command) if (index, word) != (0, "--"))
    if command and _LISTED.fullmatch(command[0]):
        raise SpecmeterError(
            f"{command[0]} stands alone: it belongs to no option, and no program is called so.",
            next_step="Write a list of numbers with commas, as 8,10, and the server's command after `--`.",
        )
    given = [name for name, value in (("--url", args.url), ("--server", args.server), ("-- CMD", command)) if value]
    if len(given) > 1:
        raise SpecmeterError(f"More than one server is named: {' and '.join(given)}.", next_step="Give one of them.")
    if args.link and command:
        raise SpecmeterError("--link names a running server, so it goes with --url and not with a command.")
    if args.engine is not None and args.engine not in ENGINE_NAMES:
        raise SpecmeterError(f"Unknown engine: {args.engine}", f"Known engines are {', '.join(ENGINE_NAMES)}.")
    if args.server:
        return read_server_file(args.server)
    if args.url:
        return ServerSpec(args.engine, url=checked_url(args.url), link=args.link)
    if args.link:
        return ServerSpec(args.engine, link=args.link)
    words = command or tuple(default)
    if not words:
        raise SpecmeterError("No server is named.", next_step="Give --url U, --link ID, or `-- CMD` at the end.")
    return ServerSpec(args.engine or engine_of(words), command=words)


def read_server_file(reference: str) -> ServerSpec:
    """The server in ``FILE`` or ``FILE:NAME``; without a name the file must hold exactly one."""
    path, name = Path(reference), ""
    if not path.exists() and ":" in reference:
        path, name = Path(reference.rpartition(":")[0]), reference.rpartition(":")[2]
    servers = _servers(path)
    if not name and len(servers) > 1:
        raise SpecmeterError(f"{path} holds several servers.", next_step=f"Give {path}:NAME; {_listed(servers)}.")
    chosen = name or next(iter(servers))
    if not isinstance(servers.get(chosen), dict):
        raise SpecmeterError(f"{path} has no [server.{chosen}].", next_step=f"It has {_listed(servers)}.")
    return _from_table(servers[chosen], f"[server.{chosen}] of {path}")


def server_names(path: Path) -> tuple[str, ...]:
    """The names of a file's ``[server.NAME]`` tables, in their order."""
    return tuple(_servers(path))


def _servers(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecmeterError(f"The server file cannot be read: {path}", error.strerror or str(error)) from None
    except ValueError as error:
        raise SpecmeterError(f"The server file is not valid TOML: {path}", str(error)) from None
    servers = document.get("server")
    if not isinstance(servers, dict) or not servers:
        raise SpecmeterError(f"{path} has no [server.NAME] table.")
    return servers


def _listed(servers: dict[str, Any]) -> str:
    return ", ".join(sorted(servers))


def _from_table(table: dict[str, Any], where: str) -> ServerSpec:
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise SpecmeterError(f"{where} has unknown keys: {', '.join(unknown)}", f"Known: {', '.join(sorted(_KEYS))}.")
    command, env, settings = table.get("command", []), table.get("env", {}), table.get("settings", {})
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise SpecmeterError(f"{where}: command must be a list of strings.")
    if not isinstance(env, dict) or not isinstance(settings, dict):
        raise SpecmeterError(f"{where}: env and settings must be tables.")
    url = table.get("url")
    if bool(command) == bool(url):
        raise SpecmeterError(f"{where} must have either a command or a url.")
    for key in _TEXTS:
        if not isinstance(table.get(key, ""), str):
            raise SpecmeterError(f"{where}: {key} is {table[key]!r}, which is no text.", next_step=_TEXTS[key])
    engine = table.get("engine") or (engine_of(command) if command else None)
    if engine is not None and engine not in ENGINE_NAMES:
        raise SpecmeterError(f"{where}: unknown engine {engine}", f"Known engines are {', '.join(ENGINE_NAMES)}.")
    return ServerSpec(
        engine,
        command=tuple(command),
        env={str(key): str(value) for key, value in env.items()},
        url=checked_url(url) if url else None,
        link=table.get("link"),
        settings=settings,
        api_key_env=table.get("api_key_env"),
    )


def checked_url(url: str) -> str:
    """The server's base URL without a trailing slash or ``/v1``; raises SpecmeterError if it is no http(s) URL."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        good = parts.scheme in ("http", "https") and bool(_HOST.fullmatch(parts.hostname or "")) and parts.port != 0
        httpx.URL(url if "://" in url else f"http://{url}")
        # A label of a name is 1 to 63 long (RFC 1035, 2.3.4), a final dot aside.
        labels = (parts.hostname or "").removesuffix(".").split(".")
        good = good and (":" in labels[0] or all(0 < len(label) < 64 for label in labels))
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good or not url.isprintable():
        raise SpecmeterError(
            f"Not a server's URL: {shown_url(url)}", next_step="Give something like http://127.0.0.1:8000"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")


def engine_of(command: Sequence[str]) -> str:
    """The engine that ``command`` starts, from its words alone; raises SpecmeterError if that is not plain."""
    words = [Path(word).name for word in command]
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if (word == "vllm" and following == "serve") or word.startswith("vllm.entrypoints."):
            return "vllm"
        if word.startswith("sglang.launch_server") or (word == "sglang" and following == "serve"):
            return "sglang"
        if word == "specmeter" and following == "serve":
            return "embedded"
    raise SpecmeterError(
        f"It is not plain which engine this command starts: {' '.join(mask_command(command)[:4])}",
        next_step=f"Say it: --engine {'|'.join(ENGINE_NAMES)}.",
    )
