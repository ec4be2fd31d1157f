"""Reading and changing ``--name value`` and ``--name=value`` flags of a command line, quoting left alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

Command = tuple[str, ...]
_FLAG = re.compile(r"--?[A-Za-z]")
# ASCII only: str.isdigit takes `²`, which int() refuses, and int() refuses text of thousands of digits.
_WHOLE = re.compile(r"-?[0-9]{1,9}")
# Flags of vLLM and SGLang that take every word up to the next flag, whatever the words are.
_MANY = ("--api-key", "--served-model-name", "--lora-modules", "--lora-paths", "--lora-target-modules", "--middleware")


def whole_number(text: str | None) -> int | None:
    """The whole number that ``text`` writes in at most nine ASCII digits, or None."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else None


def flag_value(command: Command, *names: str) -> str | None:
    """The value of the last of ``names`` on the command line (``_`` and ``-`` are the same), or None."""
    value = None
    for index, word in enumerate(command):
        name, equals, inline = word.partition("=")
        if _same(name, names):
            if equals:
                value = inline
            elif index + 1 < len(command):
                value = command[index + 1]
    return value


def without_flags(
    command: Command, names: Iterable[str], *, prefixes: Iterable[str] = (), switches: Iterable[str] = ()
) -> Command:
    """The command without these flags and their values; ``prefixes`` removes every flag that starts so.

    A flag has one value, and more of them only where all are numbers (or the flag is known to take many words): what
    stands behind may be the model, as in ``vllm serve --seed 1 MODEL``. Those of ``switches`` have none.
    """
    wanted, starts, bare = tuple(names), tuple(_plain(prefix) for prefix in prefixes), tuple(switches)
    kept: list[str] = []
    index = 0
    while index < len(command):
        word = command[index]
        name, equals, _ = word.partition("=")
        index += 1
        switch = _same(name, bare)
        if switch or _same(name, wanted) or (name.startswith("--") and _plain(name).startswith(starts) and starts):
            if not equals and not switch:
                index += _count_values(command[index:], many=_same(name, _MANY))
            continue
        kept.append(word)
    return tuple(kept)


def _count_values(words: Command, many: bool) -> int:
    """How many of the words behind a flag are its values; the next flag, also a short one (-tp), is none."""
    count = next((index for index, word in enumerate(words) if _FLAG.match(word)), len(words))
    if many or count == 0:
        return count
    # `--sizes 1 2 -4` has three.
    numbers = next((index for index, word in enumerate(words[:count]) if not _WHOLE.fullmatch(word)), count)
    return max(1, numbers)


def with_switch(command: Command, name: str) -> Command:
    """The command with the switch ``name``, which has no value, once."""
    return (*without_flags(command, (), switches=(name,)), name)


def with_flag(command: Command, name: str, value: str) -> Command:
    """The command with ``name`` set to ``value`` in place of any earlier value of it."""
    return (*without_flags(command, (name,)), name, value)


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _same(name: str, names: Iterable[str]) -> bool:
    return name.startswith("-") and any(_plain(name) == _plain(other) for other in names)
