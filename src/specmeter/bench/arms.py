"""The arms of a comparison: words such as ``k=2,NCCL_ALGO=Tree`` on one server's command, or a file of servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.engines.access import shown_url
from specmeter.engines.flags import Command, whole_number, with_flag, with_switch
from specmeter.engines.spec import read_server_file, server_names
from specmeter.errors import SpecmeterError
from specmeter.trace.masking import mask_command, mask_env

_NAME = re.compile(r"^([A-Za-z0-9][\w.+-]*):(?=.)")
_VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]*$")
_KEYS = {"k": "steps", "steps": "steps", "topk": "topk", "top-k": "topk", "tokens": "tokens", "draft-tokens": "tokens"}
GRAMMAR = "Write words such as k=2,topk=4,tokens=8,--flag=value,NAME=value; `baseline` or `server`; NAME: before it."


@dataclass(frozen=True)
class CompareArm:
    """One side: a server to start or to use, and the speculative setting its command holds (None: not said)."""

    name: str
    spec: ServerSpec
    setting: Setting | None = None

    def facts(self) -> dict[str, Any]:
        """What the report tells of it: command, environment and address with secrets masked."""
        return {
            "engine": self.spec.engine,
            "command": mask_command(self.spec.command),
            "env": mask_env(dict(self.spec.env)),
            "url": shown_url(self.spec.url) if self.spec.url is not None else None,
            "settings": self.setting.as_json() if self.setting is not None else None,
        }


def masked_words(text: str) -> str:
    """The words of an arm with the values of secret-looking names replaced; an unnamed arm is called by them."""
    return ",".join(mask_command([word])[0] for word in text.split(","))


def masked_line(command: Sequence[str], arms: Sequence[str]) -> list[str]:
    """A command line of ours with the words of ``arms`` (``--arm WORDS`` or ``--arm=WORDS``) masked."""
    masked = []
    for word in command:
        option, equals, value = word.partition("=")
        if word in arms:
            masked.append(masked_words(word))
        elif equals and option.startswith("--a") and value in arms:
            masked.append(f"{option}={masked_words(value)}")
        else:
            masked.append(word)
    return masked


def arms_from_words(words: Sequence[str], spec: ServerSpec) -> tuple[CompareArm, ...]:
    """Arms made of one server's command; raises SpecmeterError for a word that is none, or two arms of one name."""
    return _distinct([_from_words(word, spec) for word in words])


def arms_from_file(path: Path) -> tuple[CompareArm, ...]:
    """Every ``[server.NAME]`` of a TOML file as an arm; its ``settings`` table may hold steps, topk, draft_tokens."""
    arms = []
    for name in server_names(path):
        spec = read_server_file(f"{path}:{name}")
        arms.append(_with_table(name, spec))
    return _distinct(arms)


def _distinct(arms: Sequence[CompareArm]) -> tuple[CompareArm, ...]:
    if len(arms) < 2:
        raise SpecmeterError("A comparison needs two arms or more.", f"{len(arms)} given.", "Give --arm twice.")
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecmeterError(f"Two arms are named {twice[0]}.", next_step="Name them: --arm aa:k=2 --arm k=2.")
    return tuple(arms)


def _from_words(text: str, spec: ServerSpec) -> CompareArm:
    named = _NAME.match(text)
    name, rest = (named.group(1), text[named.end() :]) if named else (masked_words(text), text)
    if spec.engine is None or not spec.command:
        raise SpecmeterError(
            "Arms need the command that starts the server.", "A running server has one setting.", "Give `-- CMD`."
        )
    numbers: dict[str, int] = {}
    flags: list[tuple[str, str | None]] = []
    env: dict[str, str] = {}
    for word in rest.split(","):
        key, equals, value = word.partition("=")
        if word == "server":
            continue
        if word == "baseline":
            numbers["steps"] = 0
        elif key in _KEYS and (number := whole_number(value)) is not None and number >= 0:
            numbers[_KEYS[key]] = number
        elif key.startswith("--") and len(key) > 2:
            flags.append((key, value if equals else None))
        elif equals and _VARIABLE.match(key):
            env[key] = value
        else:
            shown = masked_words(text)
            raise SpecmeterError(f"--arm {shown}: {masked_words(word)!r} is no setting.", next_step=GRAMMAR)
    return configured(name, spec, setting_from(numbers, f"--arm {masked_words(text)}"), flags, env)


def setting_from(numbers: dict[str, int], where: str) -> Setting | None:
    """A Setting from ``steps``, ``topk`` and ``tokens``; None without any. Raises SpecmeterError without steps."""
    if not numbers:
        return None
    if "steps" not in numbers:
        raise SpecmeterError(f"{where} names a tree without its steps.", next_step="Add k=N.")
    return Setting.of(numbers["steps"], numbers.get("topk", 1), numbers.get("tokens"))


def configured(
    name: str,
    spec: ServerSpec,
    setting: Setting | None,
    flags: Sequence[tuple[str, str | None]] = (),
    env: dict[str, str] | None = None,
) -> CompareArm:
    """The server's command with a setting, flags (value None: a switch) and variables put in."""
    engine = engine_named(spec.engine or "")
    command: Command = spec.command
    for flag, value in flags:
        command = with_switch(command, flag) if value is None else with_flag(command, flag, value)
    if setting is not None:
        command = engine.with_setting(command, setting)
    changed = replace(spec, command=command, env={**spec.env, **(env or {})})
    return CompareArm(name, changed, setting if setting is not None else engine.setting_of(command))


def _with_table(name: str, spec: ServerSpec) -> CompareArm:
    known = {"steps": "steps", "topk": "topk", "draft_tokens": "tokens"}
    unknown = sorted(set(spec.settings) - set(known))
    if unknown or not all(type(value) is int for value in spec.settings.values()):
        raise SpecmeterError(
            f"[server.{name}].settings holds what is no setting: {', '.join(unknown) or dict(spec.settings)}",
            f"Known are {', '.join(known)}, whole numbers.",
        )
    numbers = {known[key]: value for key, value in spec.settings.items() if isinstance(value, int)}
    setting = setting_from(numbers, f"[server.{name}].settings")
    if not spec.command:
        return CompareArm(name, spec, setting)
    return configured(name, spec, setting)
