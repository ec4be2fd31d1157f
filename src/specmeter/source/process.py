"""The environment of a running process, read from ``/proc``: its interpreter, variables, folder and command."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Tuple

from .pyfile import SourceError

_WITH_VALUE = re.compile("[cmWX]")


@dataclass(frozen=True)
class Process:
    """A running Python. ``first`` are the folders that its command puts before the search path."""

    pid: int
    python: str
    cwd: str
    argv: Tuple[str, ...]
    env: Dict[str, str]
    first: Tuple[str, ...]
    script: str


def inspect(pid: int) -> Process:
    """What process ``pid`` runs with. Raises SourceError: gone, another user's, or no Python."""
    base = f"/proc/{pid}"
    if not os.path.isdir(base):
        raise SourceError(f"there is no process {pid}: it has ended, or runs in another container or machine")
    try:
        exe = os.readlink(f"{base}/exe")
        cwd = os.readlink(f"{base}/cwd")
        argv = _words(f"{base}/cmdline")
        env = dict(word.split("=", 1) for word in _words(f"{base}/environ") if "=" in word)
    except PermissionError:
        owner = os.stat(base).st_uid
        whose = f"belongs to another user (uid {owner})" if owner != os.getuid() else "is protected"
        raise SourceError(f"process {pid} {whose}: its environment cannot be read") from None
    except (FileNotFoundError, ProcessLookupError):
        raise SourceError(f"process {pid} ended while it was read") from None
    if "python" not in os.path.basename(exe).lower():
        raise SourceError(f"process {pid} is no Python: it runs {exe}")
    script, first = started_first(argv, cwd, env)
    return Process(pid, _interpreter(exe, argv, env, cwd), cwd, tuple(argv), env, first, script)


def _words(path: str) -> List[str]:
    with open(path, "rb") as handle:
        return [word.decode("utf-8", "surrogateescape") for word in handle.read().split(b"\0") if word]


def _interpreter(exe: str, argv: List[str], env: Dict[str, str], cwd: str) -> str:
    """The path Python was started by: ``exe`` alone would lead out of a virtual environment, whose python is a link."""
    named = argv[0] if argv else ""
    candidates = [os.path.join(cwd, named)] if "/" in named else [shutil.which(named, path=env.get("PATH")) or ""]
    candidates.append(os.path.join(env.get("VIRTUAL_ENV", ""), "bin", "python"))
    for candidate in candidates:
        if candidate and os.path.realpath(candidate) == exe and os.access(candidate, os.X_OK):
            return candidate
    return exe


def started_first(argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> Tuple[str, Tuple[str, ...]]:
    """The script that an interpreter's command runs ("" for ``-m``, ``-c`` and standard input), and the search path.

    Of the latter what Python puts first (docs: "The initialization of the sys.path module search path"): the script's
    folder, or the script itself where it is a folder; else ``cwd``; nothing under ``-I``, ``-P`` or PYTHONSAFEPATH.
    """
    asked, ignored, script = False, False, ""
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        if word == "-":
            break
        if not word.startswith("-"):
            script = os.path.realpath(os.path.join(cwd, word))
            break
        if word.startswith("--"):
            rest = rest[1:] if word == "--check-hash-based-pycs" else rest
            continue
        # Letters may stand together (-uP); the first that takes a value takes the rest of the word, or the next word.
        letters, value = _WITH_VALUE.split(word[1:], 1)[0], _WITH_VALUE.search(word[1:])
        asked = asked or "P" in letters or "I" in letters
        ignored = ignored or "E" in letters
        if value is not None and value.group() in "cm":
            break
        if value is not None and value.end() == len(word) - 1:
            rest = rest[1:]
    if script and os.path.isdir(script):
        return script, (script,)  # its __main__ is run, so it is there whatever is asked
    safe = asked or (bool(env.get("PYTHONSAFEPATH")) and not ignored)
    return script, () if safe else (os.path.dirname(script) if script else cwd,)
