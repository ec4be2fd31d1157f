"""The processes below a command, and what its links left: for tests that end a command in the middle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from specmeter.engines.guardian import descendants


def wait(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether ``condition`` became true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def words_of(pid: int) -> list[str]:
    """A process's command line, empty where it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def servers_below(root: int) -> list[int]:
    """The pids of the embedded servers among the descendants of a process."""
    return [pid for pid in descendants(root) if words_of(pid)[3:4] == ["serve"]]


class LinkFolder:
    """A runtime folder of its own for one command: ``env`` for it, and the links in it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.path = folder
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}

    def recording(self) -> bool:
        """Whether a server writes records: it has a ring from its first one on."""
        return any(self.path.glob("specmeter/*/*.ring"))

    def links(self) -> list[str]:
        """The links that are there, made whole or not."""
        return sorted(path.name for path in self.path.glob("specmeter/*"))
