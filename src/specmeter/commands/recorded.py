"""What a saved run's own command line says, and the same options again for another command."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from specmeter.commands import ENTRIES
from specmeter.engines import Setting, engine_named
from specmeter.engines.embedded import STEPS, TOKENS, TOPK
from specmeter.engines.flags import without_flags
from specmeter.engines.vllm import speculative_config
from specmeter.errors import SpecmeterError
from specmeter.hosts.dispatch import DEFAULT_PYTHON, take_hosts
from specmeter.trace.rundir import Run

# Where a server listens says nothing of its speed.
_PLACES = ("--host", "--port", "--api-key", "--served-model-name")
# What the run's own options say of the embedded engine, where it started it.
EMBEDDED_FACTS = ("model", "draft", "threads")
# Of the run itself, not of what it measured.
_OWN = {"out", "json", "help"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SpecmeterError(message)


@dataclass(frozen=True)
class Recorded:
    """A command line, parsed: ``command`` (empty where it cannot be read again), its options by name, the values of
    ``--on`` and ``--far-python``, and the server's ``words`` after ``--``."""

    command: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    far_python: str = DEFAULT_PYTHON
    words: tuple[str, ...] = ()

    def again(self, command: str, changes: Mapping[str, Any], drop: Sequence[str] = ()) -> list[str]:
        """``specmeter COMMAND`` with the recorded options that it has too, but for ``changes`` and without ``drop``.

        An option is named where its value is not the default of ``command``. The server's words are not in it.
        """
        words = ["specmeter", *(word for host in self.hosts for word in ("--on", host))]
        if self.far_python != DEFAULT_PYTHON:
            words += ["--far-python", self.far_python]
        words.append(command)
        wanted = {**{name: value for name, value in self.options.items() if name not in drop}, **changes}
        actions = [a for a in parser_of(command)._actions if a.option_strings and a.dest not in _OWN - set(changes)]
        # What was changed stands first, where it is seen.
        for action in sorted(actions, key=lambda a: a.dest not in changes):
            if action.dest in wanted and wanted[action.dest] != action.default:
                words += _option(action, wanted[action.dest])
        return words


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one subcommand; a line that does not fit raises SpecmeterError."""
    parser = _Parser(prog=f"specmeter {command}")
    next(entry for entry in ENTRIES if entry.name == command).load().prepare_parser(parser)
    return parser


def recorded(run: Run) -> Recorded:
    """The command line that ``run`` was made with."""
    typed = [str(word) for word in run.run.get("command") or []][1:]
    words = tuple(typed[typed.index("--") + 1 :]) if "--" in typed else ()
    own = typed[: typed.index("--")] if "--" in typed else typed
    try:
        hosts, python, own = take_hosts(own)
        if not own or own[0] not in {entry.name for entry in ENTRIES}:
            return Recorded(words=words)
        options = vars(parser_of(own[0]).parse_args(own[1:]))
    except SpecmeterError:  # of another version, or a secret is masked where a number stood
        return Recorded(words=words)
    if own[0] == "explain":
        # --live takes --requests for the least and goes on for its time: what was sent counts.
        sent = run.requests
        options["requests"] = max(options["requests"], len(set(sent["prompt_id"].tolist())) if sent else 0)
    return Recorded(own[0], options, tuple(hosts), python, words)


def _option(action: argparse.Action, value: Any) -> list[str]:
    name = action.option_strings[-1]
    if action.nargs == 0:
        return [name] if value else []
    values = value if isinstance(value, list) else [value]
    # A value that looks like an option must be one word with it.
    return [word for v in values for word in ([f"{name}={v}"] if str(v).startswith("-") else [name, str(v)])]


def without_places(words: Sequence[str]) -> tuple[str, ...]:
    """A server's words without where it listens."""
    return tuple(without_flags(tuple(words), _PLACES))


def served(line: Recorded, engine: str) -> dict[str, str | None]:
    """What the command line says of model, server and load; the step count is left out, since it is what is varied."""
    options = line.options
    found: dict[str, str | None] = {}
    if not line.command:
        return found
    if "temperature" in options:
        found["temperature"] = str(options["temperature"])
    if not line.words:
        if not named_otherwise(line):
            found |= {name: str(options.get(name) or "the default") for name in EMBEDDED_FACTS}
        return {**found, **{name: options[name] for name in ("url", "server") if options.get(name)}}
    words, draft = line.words, ""
    with contextlib.suppress(SpecmeterError):
        draft = _draft(words, engine)
        words = engine_named(engine).with_setting(words, Setting.of(0))
    words = without_places(without_flags(words, (STEPS,)))
    return {**found, "server command": shlex.join(words), "draft": draft or None}


def named_otherwise(line: Recorded) -> bool:
    """Whether the run named its server by address, link or file: model, draft and threads then stand nowhere in it."""
    return not line.words and any(line.options.get(name) for name in ("url", "link", "server"))


def _draft(words: tuple[str, ...], engine: str) -> str:
    """The speculative flags without the step count."""
    if engine == "vllm":
        config = {k: v for k, v in (speculative_config(words) or {}).items() if k != "num_speculative_tokens"}
        return json.dumps(config, sort_keys=True)
    kept = without_flags(words, (STEPS, TOPK, TOKENS))
    plain = engine_named(engine).with_setting(words, Setting.of(0))
    return shlex.join(word for word in kept if word not in plain)
