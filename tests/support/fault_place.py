"""An installed engine that is patched, its running server, and what must hold after a fault."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import specmeter
from specmeter.control import Link, find_link, processes
from tests.support.children import until

MARK = "SPECMETER_FAULTS"
_SOURCE = Path(specmeter.__file__).parents[1]  # the very specmeter that the tests import
BASE = (sys.executable, "-m", "specmeter")


@dataclass
class Place:
    """A tree of packages below ``lib``, with temporary and state folders of its own that the server's user has.

    ``options`` name the interpreter and the recipe for ``patch apply``. ``check`` imports the engine in a new process
    and must print ``fine``.
    """

    folder: Path
    lib: Path
    python: str
    options: tuple[str, ...]
    check: str
    token: str
    link: Link | None = None
    before: dict[str, str] = field(default_factory=dict)
    _hashed: dict[tuple[int, ...], str] = field(default_factory=dict, repr=False)

    @property
    def tmp(self) -> Path:
        """Its temporary folder, on the file system that may be filled."""
        return self.folder / "tmp"

    def env(self, marked: bool = True) -> dict[str, str]:
        """The environment of a command here; the mark tells what belongs to the commands and not to the server."""
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        own = {
            "TMPDIR": str(self.tmp),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "PYTHONPATH": f"{self.lib}{os.pathsep}{_SOURCE}",
        }
        return {**keep, **own, **({MARK: self.token} if marked else {})}

    def on(self) -> list[str]:
        """The words that send a command here over ssh."""
        words = [f"{name}={value}" for name, value in self.env().items() if name not in ("PATH", "HOME", "LANG")]
        return ["--on", f"ssh far env {' '.join(words)}", "--far-python", sys.executable]

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end, without a fault."""
        command = [*BASE, *words, "--json"]
        return subprocess.run(command, env=self.env(), capture_output=True, text=True, timeout=120, check=False)

    def result(self, *words: str) -> dict[str, Any]:
        """Its result; the command has to succeed."""
        done = self.call(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}{self.crash_logs()}"
        return dict(json.loads(done.stdout)["result"])

    def hashes(self) -> dict[str, str]:
        """Every entry of the tree: type, mode, owner, modification time (of files) and contents, byte code included."""
        found = {}
        for path in sorted(self.lib.rglob("*")):
            info = path.lstat()
            facts = f"{stat.S_IFMT(info.st_mode):o} {stat.S_IMODE(info.st_mode):o} {info.st_uid} {info.st_gid}"
            if stat.S_ISREG(info.st_mode):
                # A file's change time cannot be set, so what it and the rest say is unchanged was hashed before.
                key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
                if key not in self._hashed:
                    self._hashed[key] = hashlib.sha256(path.read_bytes()).hexdigest()
                facts += f" {info.st_mtime_ns} {self._hashed[key]}"
            found[str(path.relative_to(self.lib))] = facts
        return found

    def changes(self) -> list[str]:
        """Entries that differ from ``before``."""
        now = self.hashes()
        return sorted(name for name in {*now, *self.before} if now.get(name) != self.before.get(name))

    def processes_left(self) -> list[int]:
        """Processes with the mark in their environment: those of commands, here or behind ssh."""
        wanted = f"{MARK}={self.token}\0".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def crash_logs(self) -> str:
        """Tracebacks that commands have written there."""
        return "".join(path.read_text() for path in self.tmp.glob("specmeter-crash-*"))

    def files_left(self) -> list[str]:
        """What no command may leave: anything but the server's own link and its finished files."""
        kept = self.link.path if self.link is not None else None
        found = []
        for path in [*self.tmp.rglob("*"), *(self.folder / "state").rglob("*")]:
            of_link = kept is not None and (path == kept or kept in path.parents or path in kept.parents)
            empty_state = path.is_dir() and self.folder / "state" in path.parents
            base = path.is_dir() and path.name == f"specmeter-{os.geteuid()}"
            if path.name.endswith(".new") or not (of_link or empty_state or base):
                found.append(str(path.relative_to(self.folder)))
        return found

    def starts(self) -> str:
        """``fine`` if a process that is started now can import the engine and use it; else what it said."""
        command = [self.python, "-c", self.check]
        env = {**self.env(False), "TMPDIR": str(self.folder.parent)}  # engines keep caches there
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd="/", check=False)
        said = done.stdout.strip()
        return said if said == "fine" and not done.stderr else f"code {done.returncode}: {said} {done.stderr[-300:]}"

    def armed(self) -> list[int]:
        """Processes of the server's link that say their probes are in."""
        assert self.link is not None
        found = processes(self.link, alive_only=True)
        return [one.pid for one in found if one.armed or one.report["armed_points"]]


@dataclass
class Serving:
    """A server under ``specmeter patch`` with requests going on all the time; counts what its client saw."""

    place: Place
    process: subprocess.Popen[str]
    url: str
    ask: Callable[[str], bool]
    pause_s: float = 0.05
    good: int = 0
    bad: list[str] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        while not self._end.wait(self.pause_s):
            try:
                fine = self.ask(self.url)
                if fine:
                    self.good += 1
                else:
                    self.bad.append("a wrong answer")
            except Exception as error:
                self.bad.append(f"{type(error).__name__}: {error}")

    def still_answers(self) -> bool:
        """Whether an answer came that was asked for after now."""
        wanted = self.good + 2
        end = time.monotonic() + 60
        while self.good < wanted and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.good >= wanted

    def stop(self) -> None:
        """End the client, then the server and all that it started."""
        self._end.set()
        self._thread.join(60)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.communicate()


def patched_link(place: Place, name: str) -> None:
    """Patch without a fault, so that a server which is started now carries the runtime; the tree is hashed before."""
    place.before = place.hashes()
    made = place.result("patch", "apply", *place.options, "--link", name, "--records", "4096")
    place.link = find_link(str(made["path"]))


def unpatched(place: Place, wanted: int) -> None:
    """Wait until ``wanted`` processes have the runtime, and take the patch off again."""
    assert place.link is not None
    link = place.link
    until(lambda: len(processes(link, alive_only=True)) >= wanted, "the server's runtime", 60)
    place.result("patch", "restore")
    assert place.changes() == [], place.changes()


def copied_tree(source: Path, target: Path) -> None:
    """A package without byte code."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def small_disk(folder: Path, size: str) -> bool:
    """Mount a small file system there; False where that is not allowed."""
    folder.mkdir(exist_ok=True)
    words: Sequence[str] = ("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder))
    return subprocess.run(words, capture_output=True, check=False).returncode == 0
