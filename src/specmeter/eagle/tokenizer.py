"""Text to token ids and back, the chat template, and decoding of a growing sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specmeter.errors import SpecmeterError

REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a Hugging Face style model directory."""

    def __init__(self, directory: Path) -> None:
        """Reads tokenizer.json and the configs beside it; SpecmeterError if there is none or it cannot be read."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SpecmeterError(
                f"{directory} has no tokenizer.json.", "", "Name a complete model directory (see `specmeter fetch`)."
            )
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises plain Exception
            raise SpecmeterError(f"Cannot read {path}.", str(error), "Fetch or copy the file again.") from error
        self._config = _read_json(directory / "tokenizer_config.json")
        self.vocab_size: int = self._backend.get_vocab_size()
        self.stop_ids = self._find_stop_ids(directory)
        self._template = self._compile_template(directory)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds what the model wants at the start, if anything."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.

        Raises SpecmeterError if the model has no chat template or the template refuses the messages.
        """
        if self._template is None:
            raise SpecmeterError(
                "The model has no chat template.", "It is a base model.", "Use /v1/completions with a plain prompt."
            )
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._named_tokens()
            )
        except Exception as error:  # whatever the template's own arithmetic and look-ups may raise
            raise SpecmeterError(
                "The model's chat template refuses these messages.", str(error), "Send the roles that it knows."
            ) from error

    def _named_tokens(self) -> dict[str, str]:
        found = {name: _token_text(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        return {name: text for name, text in found.items() if text is not None}

    def _find_stop_ids(self, directory: Path) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(directory / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            found.update(i for i in ids if type(i) is int)
        eos = _token_text(self._config.get("eos_token"))
        own = None if eos is None else self._backend.token_to_id(eos)
        return tuple(sorted(found | ({own} if own is not None else set())))

    def _compile_template(self, directory: Path) -> Template | None:
        file = directory / "chat_template.jinja"
        try:
            source = file.read_text("utf-8") if file.is_file() else self._config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecmeterError(f"Cannot read {file}.", str(error), "Fetch or copy the file again.") from error
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        # The template comes with the model: it may not reach anything but what it is given.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            return environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise SpecmeterError(
                f"The chat template in {directory} is broken.", str(error), "Fetch or copy the directory again."
            ) from error


class StreamDecoder:
    """Text of a sequence that grows: each ``push`` gives what can be said for certain, never half a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Tokens since the last text given out, after a few already given: some tokenizers need the neighbours.
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add token ids; returns the new text, "" while the last character is incomplete."""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[: self._given], self._skip) if self._given else ""
        after = self._tokenizer.decode(self._ids, self._skip)
        if after.endswith(REPLACEMENT):
            return ""
        del self._ids[: self._given]
        self._given = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """The rest: what an incomplete last character held back."""
        before = self._tokenizer.decode(self._ids[: self._given], self._skip)
        after = self._tokenizer.decode(self._ids, self._skip)
        self._ids, self._given = [], 0
        return after[len(before) :]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecmeterError(f"Cannot read {path}.", str(error), "Fetch or copy the file again.") from error
    if not isinstance(document, dict):
        raise SpecmeterError(f"Cannot read {path}.", "It is not a JSON object.", "Fetch or copy the file again.")
    return document


def _token_text(value: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
