"""Prompts: the built-in set, and loaders for the files people have (JSONL, ShareGPT, OpenAI messages)."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from specmeter.errors import SpecmeterError
from specmeter.trace.strict_json import parse_json

BUILT_IN = "built-in"
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_PROMPTS = 10_000
MAX_BROKEN_SHOWN = 5
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat ``messages``, a stable ``prompt_id`` and its ``kind`` (chat, code, maths, ...)."""

    prompt_id: str
    kind: str
    messages: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The contents alone, for servers that take plain text."""
        return "\n\n".join(content for _, content in self.messages)

    def as_messages(self) -> list[dict[str, str]]:
        """The messages as the OpenAI API wants them."""
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class PromptSet:
    """Prompts with the name of the set; acceptance depends on content, so every report names it."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """Of the prompts' ids and texts: two files of one name may hold different prompts."""
        told = json.dumps([[prompt.prompt_id, prompt.messages] for prompt in self.prompts])
        return hashlib.sha256(told.encode("utf-8")).hexdigest()

    def sample(self, count: int, seed: int) -> tuple[Prompt, ...]:
        """``count`` prompts in a seeded order that takes the kinds in turn; repeats once all have been used."""
        rng = random.Random(seed)
        by_kind: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            by_kind.setdefault(prompt.kind, []).append(prompt)
        for group in by_kind.values():
            rng.shuffle(group)
        longest = max(len(group) for group in by_kind.values())
        dealt = [group[place] for place in range(longest) for group in by_kind.values() if place < len(group)]
        return tuple(dealt[index % len(dealt)] for index in range(count))


def load_prompts(source: str | None, kinds: Sequence[str] = ()) -> PromptSet:
    """The built-in set (``source`` None or ``built-in``) or the file at ``source``, narrowed to ``kinds``.

    A JSONL line is a string or an object with ``prompt``, ``messages`` or ShareGPT's ``conversations``; a JSON file is
    a list of these. Raises SpecmeterError that names broken lines by number, for empty files and for huge ones.
    """
    if source is None or source == BUILT_IN:
        text = resources.files("specmeter.bench").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
        found = PromptSet(BUILT_IN, _from_entries(_lines(text, BUILT_IN), BUILT_IN))
    else:
        found = _load_file(Path(source))
    if not kinds:
        return found
    chosen = tuple(prompt for prompt in found.prompts if prompt.kind in kinds)
    if not chosen:
        known = ", ".join(sorted({prompt.kind for prompt in found.prompts}))
        raise SpecmeterError(f"The prompt set has no prompt of kind {', '.join(kinds)}.", f"Its kinds are: {known}.")
    return PromptSet(f"{found.name} ({', '.join(kinds)})", chosen)


def _load_file(path: Path) -> PromptSet:
    try:
        with path.open("rb") as file:  # a pipe or a device does not tell its size
            raw = b"" if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES else file.read(MAX_FILE_BYTES + 1)
            size = max(os.fstat(file.fileno()).st_size, len(raw))
        if size > MAX_FILE_BYTES:
            raise SpecmeterError(
                f"The prompt file is too large: {path} has {size / 1e6:.0f} MB or more.",
                f"At most {MAX_FILE_BYTES / 1e6:.0f} MB are read.",
                f"Take a part of it: head -n 1000 {path.name} > prompts.jsonl",
            )
    except OSError as error:
        raise SpecmeterError(f"The prompt file cannot be read: {path}", error.strerror or str(error)) from None
    text = _decoded(raw, path)
    if not text.strip():
        raise SpecmeterError(f"The prompt file is empty: {path}")
    entries = _whole_list(text) or _lines(text, str(path))
    return PromptSet(path.name, _from_entries(entries, str(path)))


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SpecmeterError(
            f"The prompt file is not UTF-8: {path}", f"The first bad byte is in line {line}."
        ) from None


def _whole_list(text: str) -> Iterator[tuple[int, Any]] | None:
    """Numbered entries if the text is one JSON list (ShareGPT's usual form), else None."""
    if not text.lstrip().startswith("["):
        return None
    try:
        document = parse_json(text)
    except ValueError:
        return None
    return iter(enumerate(document, 1)) if isinstance(document, list) else None


def _lines(text: str, where: str) -> Iterator[tuple[int, Any]]:
    """Numbered entries of JSONL; raises SpecmeterError naming the lines that are not JSON."""
    entries: list[tuple[int, Any]] = []
    broken: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                entries.append((number, parse_json(line)))
            except ValueError as error:
                broken.append((number, str(error)))
    _refuse_broken(broken, where)
    return iter(entries)


def _refuse_broken(broken: Sequence[tuple[int, str]], where: str) -> None:
    if not broken:
        return
    shown = "; ".join(f"line {number}: {reason}" for number, reason in broken[:MAX_BROKEN_SHOWN])
    more = f"; and {len(broken) - MAX_BROKEN_SHOWN} more" if len(broken) > MAX_BROKEN_SHOWN else ""
    raise SpecmeterError(f"The prompt file has broken lines: {where}", shown + more, "Mend or delete these lines.")


def _from_entries(entries: Iterator[tuple[int, Any]], where: str) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    broken: list[tuple[int, str]] = []
    names: set[str] = set()
    for number, entry in entries:
        try:
            prompts.append(_named_apart(_prompt(number, entry), number, names))
        except ValueError as error:
            broken.append((number, str(error)))
        if len(prompts) >= MAX_PROMPTS:
            break
    _refuse_broken(broken, where)
    if not prompts:
        raise SpecmeterError(f"The prompt file holds no prompt: {where}")
    return tuple(prompts)


def _named_apart(prompt: Prompt, number: int, names: set[str]) -> Prompt:
    """The prompt, its id followed by its line where an earlier one has it: pairs are formed by id."""
    if prompt.prompt_id in names:
        prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}#{number}")
    names.add(prompt.prompt_id)
    return prompt


def _prompt(number: int, entry: Any) -> Prompt:
    if isinstance(entry, str):
        return Prompt(str(number), "user", (("user", _text(entry)),))
    if isinstance(entry, list):
        entry = {"messages": entry}
    if not isinstance(entry, dict):
        raise ValueError(f"neither a string nor an object but {type(entry).__name__}")
    identity, kind = entry.get("id", number), entry.get("kind", entry.get("category", "user"))
    return Prompt(_text(str(identity)), _text(str(kind)), _messages(entry))


def _messages(entry: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if "prompt" in entry:
        return (("user", _text(entry["prompt"])),)
    for key, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in entry:
            turns = entry[key]
            if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
                raise ValueError(f"{key} is not a list of objects")
            return _turns(turns, role_key, text_key)
    raise ValueError("has none of prompt, messages, conversations")


def _turns(turns: Sequence[Mapping[str, Any]], role_key: str, text_key: str) -> tuple[tuple[str, str], ...]:
    """The turns up to the last of the user: the model is to answer that one."""
    read = [(_ROLES.get(str(turn.get(role_key)), "assistant"), _content(turn.get(text_key))) for turn in turns]
    while read and read[-1][0] != "user":
        read.pop()
    if not read:
        raise ValueError("has no turn of the user")
    return tuple((role, _text(content)) for role, content in read)


def _content(content: Any) -> Any:
    """A content in parts (OpenAI) as one text; parts that are not text are refused."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type", "text") == "text"]
    if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
        raise ValueError("has content that is not text")
    return "".join(part for part in parts if isinstance(part, str))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the text is not a string but {type(value).__name__}")
    if not value.strip():
        raise ValueError("the text is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("the text has half of a surrogate pair (\\ud800 to \\udfff), which no server can be sent")
    return value
