"""Takes secrets out of environments and command lines before anything is stored or printed."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MASK = "***"
# Shorter values stand in a log by chance: masking them would spoil it. A variable's name says less than an option's.
LEAST_OPTION, LEAST_VARIABLE = 4, 8
_SECRET = re.compile(
    r"(?i)(api[-_]?key|access[-_]?key|secret|token(?!s|iz)|passw(or)?d|passphrase|passwd|credential|auth(?!or)|"
    r"cookie|private[-_]?key|session[-_]?key|(^|[-_])(key|pat|pwd|pw)$)"
)
# Whole values that are secrets wherever they stand: bearer headers, well-known token shapes, URL passwords, and what
# stands alone before the @ of a web address (a token, more often than a name).
_VALUES = re.compile(
    r"(?i)(bearer\s+)[^\s\"']+|\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bap]-|AKIA)[A-Za-z0-9_\-]{8,}|"
    r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)|(?<=http://)([^/\s:@]+)(?=@)|(?<=https://)([^/\s:@]+)(?=@)"
)


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment with the values of secret-looking names, and secret-looking values, replaced."""
    return {name: MASK if _SECRET.search(name) and value else _mask_value(value) for name, value in env.items()}


def mask_command(command: Sequence[str]) -> list[str]:
    """A copy of a command line with secrets replaced: ``--api-key X``, ``--token=X``, passwords in URLs."""
    masked, hide_next = [], False
    for word in command:
        if hide_next and not word.startswith("--"):
            masked.append(MASK)
            hide_next = False
            continue
        name, equals, value = word.partition("=")
        secret = bool(_SECRET.search(name.lstrip("-"))) and not re.search(r"[/\s]", name)
        if secret and equals and value:
            masked.append(f"{name}={MASK}")
        else:
            masked.append(_mask_value(word))
        hide_next = secret and not equals and word.startswith("-")
    return masked


def secrets_of(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The secret values that a command line and an environment hold, longest first."""
    found = {value for value in _option_secrets(command) if len(value) >= LEAST_OPTION}
    found |= {value for name, value in env.items() if _SECRET.search(name) and len(value) >= LEAST_VARIABLE}
    for word in (*command, *env.values()):
        found |= {part for match in _VALUES.finditer(word) if len(part := _secret_part(match)) >= LEAST_OPTION}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def mask_text(text: str, secrets: Iterable[str]) -> str:
    """``text`` with every one of ``secrets`` replaced."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


def mask_file(path: Path, secrets: Iterable[str]) -> None:
    """Replace every one of ``secrets`` in a file by as many stars, in place: it works on a full disk too.

    A file that is not there, is empty, or cannot be written is left alone.
    """
    with suppress(OSError, ValueError), path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as text:
        for secret in secrets:
            wanted = secret.encode("utf-8", "surrogateescape")
            at = text.find(wanted)
            while at >= 0:
                text[at : at + len(wanted)] = b"*" * len(wanted)
                at = text.find(wanted, at + len(wanted))


def _option_secrets(command: Sequence[str]) -> Iterator[str]:
    for word, masked in zip(command, mask_command(command)):  # noqa: B905 (3.9: it runs on far sides)
        if masked == MASK:
            yield word
        elif masked.endswith(f"={MASK}"):
            yield word.partition("=")[2]


def _secret_part(match: re.Match[str]) -> str:
    """What of a secret-looking value is the secret itself: not ``Bearer``, not the user's name before a password."""
    whole = match.group(0)
    if match.group(4) or match.group(5):
        return whole if len(whole) >= LEAST_VARIABLE else ""  # it may be a name all the same
    if match.group(1):
        return whole[len(match.group(1)) :]
    return whole if match.group(2) else whole[len(match.group(3)) + 1 :]


def _mask_value(value: str) -> str:
    return _VALUES.sub(_replace, value)


def _replace(match: re.Match[str]) -> str:
    if match.group(1):
        return match.group(1) + MASK
    if match.group(2):
        return match.group(2) + MASK
    if match.group(4) or match.group(5):
        return MASK
    return f"{match.group(3)}:{MASK}"
