"""Takes secrets out of environments and command lines before anything is stored or printed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "***"
_SECRET = re.compile(
    r"(?i)(api[-_]?key|access[-_]?key|secret|token(?!s|iz)|passw(or)?d|passphrase|passwd|credential|auth(?!or)|"
    r"cookie|private[-_]?key|session[-_]?key|(^|[-_])(key|pat|pwd|pw)$)"
)
# Whole values that are secrets wherever they stand: bearer headers, well-known token shapes, URL passwords.
_VALUES = re.compile(
    r"(?i)(bearer\s+)[^\s\"']+|\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bap]-|AKIA)[A-Za-z0-9_\-]{8,}|"
    r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)"
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


def _mask_value(value: str) -> str:
    return _VALUES.sub(_replace, value)


def _replace(match: re.Match[str]) -> str:
    if match.group(1):
        return match.group(1) + MASK
    if match.group(2):
        return match.group(2) + MASK
    return f"{match.group(3)}:{MASK}"
