"""The environment of a running process, read from ``/proc``: its interpreter, variables, folder and command."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Dict, List, Tuple

from .pyfile import SourceError


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
    script, first = _started(argv, cwd)
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


def _started(argv: List[str], cwd: str) -> Tuple[str, Tuple[str, ...]]:
    """The script that runs ("" for ``-m`` and ``-c``), and what Python then puts first on the search path."""
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        if word in ("-m", "-c"):
            return "", (cwd,)
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            rest = rest[1:]
        elif not word.startswith("-"):
            script = os.path.realpath(os.path.join(cwd, word))
            return script, (os.path.dirname(script),)
        elif word.startswith(("-I", "-P")) or word == "-":
            return "", ()
    return "", (cwd,)
