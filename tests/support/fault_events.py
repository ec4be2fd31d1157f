"""One fault at a random moment of one operation, and whether everything is as it must be afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fault_place import BASE, Place, Serving
from tests.support.loopback_ssh import Loopback
from tests.support.tcp_proxy import TcpProxy

WATCHDOG_S = 30.0  # what docs/profile.md states
ENDS_S = 80.0
TIDY_S = 60.0

KINDS = ("kill controller", "kill ssh client", "kill sshd session", "drop connection", "SIGTERM", "SIGINT", "disk full")
OVER_SSH = ("kill ssh client", "kill sshd session", "drop connection")
OPERATIONS = ("apply", "restore", "arm", "disarm", "profile")


@dataclass
class Event:
    """What was done and what came of it; ``faults`` is empty when everything held."""

    kind: str
    operation: str
    over_ssh: bool
    delay_s: float
    outcome: str = ""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Scene:
    """Where faults happen: a place with its server, reached here or over ssh, through proxies that can break."""

    place: Place
    serving: Serving
    loopback: Loopback
    ssh: TcpProxy
    http: TcpProxy
    engine: str
    durations: dict[tuple[str, bool], float] = field(default_factory=dict)

    def words(self, operation: str, over_ssh: bool) -> list[str]:
        """The command line of an operation."""
        assert self.place.link is not None
        link = ["--link", self.place.link.id]
        out = self.place.folder.parent / f"{self.place.folder.name}-runs" / f"{time.monotonic_ns()}"
        url = f"http://127.0.0.1:{self.http.port}"
        load = ["--engine", self.engine, "--baseline", "none", "--requests", "2"]
        load += ["--max-tokens", "2400" if self.engine == "sglang" else "48"]  # some seconds with the probes in
        command = {
            "apply": ["patch", "apply", *self.place.options, "--records", "1024"],
            "restore": ["patch", "restore"],
            "arm": ["arm", *link],
            "disarm": ["disarm", *link],
            "profile": ["profile", *link, "--url", url, *load, "--out", str(out)],
        }[operation]
        return [*BASE, *(self.place.on() if over_ssh else []), *command, "--json"]

    def start(self, operation: str, over_ssh: bool) -> subprocess.Popen[str]:
        """Start the operation, in a session of its own."""
        env = self.place.env()
        env["PATH"] = f"{self.loopback.bin}:{env['PATH']}"
        return subprocess.Popen(
            self.words(operation, over_ssh), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def prepare(self, operation: str) -> None:
        """Bring the place into the state that the operation changes."""
        assert self.place.link is not None
        if operation == "restore":
            self.place.result("patch", "apply", *self.place.options, "--records", "1024")
        if operation == "disarm":
            self.place.result("arm", "--link", self.place.link.id)

    def note_duration(self, event: Event, seconds: float) -> None:
        """An operation that was over before its fault: on a machine less busy by now, faults have to come earlier."""
        key = (event.operation, event.over_ssh)
        self.durations[key] = min(self.durations.get(key, seconds), seconds)

    def typical_s(self, operation: str, over_ssh: bool) -> float:
        """How long the operation takes without a fault, run once; it is undone again."""
        key = (operation, over_ssh)
        if key not in self.durations:
            self.prepare(operation)
            began = time.monotonic()
            child = self.start(operation, over_ssh)
            _, err = child.communicate(timeout=120)
            assert child.returncode == 0, f"{operation}: {err}{self.place.crash_logs()}"
            self.durations[key] = time.monotonic() - began
            event = Event("none", operation, over_ssh, 0.0)
            recover(self, event)
            assert not event.faults, event.faults
        return self.durations[key]


def happen(scene: Scene, event: Event) -> None:
    """Start the operation, let the fault happen, put everything back, and note what did not hold."""
    began = time.monotonic()
    scene.prepare(event.operation)
    filler = _fill(scene, event) if event.kind == "disk full" else None
    try:
        started = time.monotonic()
        child = scene.start(event.operation, event.over_ssh)
        if filler is None:
            time.sleep(event.delay_s)
            _strike(scene, event, child)
        try:
            out, err = child.communicate(timeout=ENDS_S)
        except subprocess.TimeoutExpired:
            event.faults.append(f"the command did not end in {ENDS_S:g} s")
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
        if child.returncode == 0 and filler is None:
            scene.note_duration(event, time.monotonic() - started)
        _judge(event, child.returncode, out, err)
        _check_now(scene, event)
        if filler is not None:
            _undo_on_a_full_disk(scene, event)
    finally:
        if filler is not None:
            filler.unlink()
    recover(scene, event)
    event.seconds = time.monotonic() - began


def _fill(scene: Scene, event: Event) -> Path:
    """Fill the place's file system up to a few bytes, which ``delay_s`` tells (0..1 of 160 kB, often none)."""
    filler = scene.place.folder / "filler"
    room = int(160_000 * event.delay_s)
    with filler.open("wb", buffering=0) as file:
        info = os.statvfs(scene.place.folder)
        left = max(0, info.f_bavail * info.f_frsize - room)
        while left > 0:
            left -= file.write(bytes(min(left, 1 << 20)))
    return filler


def _strike(scene: Scene, event: Event, child: subprocess.Popen[str]) -> None:
    strike: dict[str, Callable[[], bool]] = {
        "kill controller": lambda: _kill([child.pid], signal.SIGKILL),
        "kill ssh client": lambda: _kill(_children(child.pid), signal.SIGKILL),
        "kill sshd session": lambda: _kill(_sessions(scene.loopback), signal.SIGKILL),
        "drop connection": lambda: (scene.ssh if event.over_ssh else scene.http).drop() > 0,
        "SIGTERM": lambda: _kill([child.pid], signal.SIGTERM),
        "SIGINT": lambda: _kill([child.pid], signal.SIGINT),
    }
    while child.poll() is None and not strike[event.kind]():
        time.sleep(0.002)  # there is no connection yet


def _kill(pids: list[int], number: int) -> bool:
    hit = False
    for pid in pids:
        try:
            os.kill(pid, number)
            hit = True
        except ProcessLookupError:
            continue
    return hit


def _children(pid: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _sessions(loopback: Loopback) -> list[int]:
    """The processes of sshd that serve a connection, not what runs in it."""
    found, waiting = [], _children(loopback.process.pid)
    while waiting:
        pid = waiting.pop()
        try:
            name = Path(f"/proc/{pid}/comm").read_text()
        except OSError:
            continue
        if name.startswith("sshd"):
            found.append(pid)
            waiting += _children(pid)
    return found


def _judge(event: Event, code: int, out: str, err: str) -> None:
    """What the command said: a code and plain words, never a traceback or a fault of ours."""
    if code == -signal.SIGINT and err.rstrip().endswith("KeyboardInterrupt"):
        event.outcome = "interrupted while Python started"  # before a line of ours could catch it
        return
    if "Traceback" in err or "fault of ours" in err or "fault of ours" in out:
        event.faults.append(f"not said plainly (code {code}): {err[-600:]}")
    if code == 0:
        event.outcome = "done"
    elif code < 0:
        event.outcome = f"died of signal {-code}"
    else:
        event.outcome = {3: "refused", 4: "connection or server lost", 5: "host or disk", 130: "interrupted"}.get(
            code, f"code {code}"
        )
    if event.kind == "disk full" and code and "full" not in err and "space" not in err and "quota" not in err:
        event.faults.append(f"a full disk is not named (code {code}): {err[-600:]}")


def _check_now(scene: Scene, event: Event) -> None:
    """In the very state that the fault has left: the server answers, a new one starts, no process is left."""
    end = time.monotonic() + TIDY_S
    while scene.place.processes_left() and time.monotonic() < end:
        time.sleep(0.02)
    left = scene.place.processes_left()
    if left:
        event.faults.append(f"still running after {TIDY_S:g} s: {[_described(pid) for pid in left]}")
        _kill(left, signal.SIGKILL)
    if event.operation in ("apply", "restore"):
        said = scene.place.starts()
        if said != "fine":
            event.faults.append(f"a server started now does not work: {said}")
    if not scene.serving.still_answers():
        event.faults.append("the server does not answer")


def _described(pid: int) -> str:
    """What a process that should be gone waits for."""
    try:
        entry = Path(f"/proc/{pid}")
        streams = [os.readlink(entry / "fd" / str(number)) for number in range(3)]  # noqa: PTH115
        parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        words = (entry / "cmdline").read_bytes()[-200:]
        return f"{pid} of {parent} in {(entry / 'wchan').read_text()}, {streams}: {words!r}"
    except OSError:
        return f"{pid}, gone by now"


def _undo_on_a_full_disk(scene: Scene, event: Event) -> None:
    """What takes us off again must work without room."""
    words = {"apply": ["patch", "restore"], "restore": ["patch", "restore"]}.get(event.operation)
    assert scene.place.link is not None
    done = scene.place.call(*(words or ["disarm", "--link", scene.place.link.id]))
    if done.returncode:
        event.faults.append(f"cannot be undone on a full disk (code {done.returncode}): {done.stderr[-600:]}")
    if words and scene.place.changes():
        event.faults.append(f"on a full disk the tree is not restored: {scene.place.changes()[:5]}")


def recover(scene: Scene, event: Event) -> None:
    """Undo what the operation did or half did; then nothing of it may be left."""
    place = scene.place
    assert place.link is not None
    if event.operation == "profile" and event.kind != "none":
        _await_watchdog(scene, event)
    words = ["patch", "restore"] if event.operation in ("apply", "restore") else ["disarm", "--link", place.link.id]
    done = place.call(*words)
    if done.returncode:
        event.faults.append(f"{words} failed (code {done.returncode}): {done.stderr[-600:]}")
    state = json.loads(place.call("status", "--link", place.link.id).stdout or "{}").get("result", {})
    if place.armed() or any(link["armed"] or link["controller"] for link in state.get("links", [])):
        event.faults.append(f"still armed: {place.armed()}")
    if place.changes():
        event.faults.append(f"the tree differs: {place.changes()[:5]}")
    if place.crash_logs():
        event.faults.append(place.crash_logs()[-1500:])
    if place.files_left():
        event.faults.append(f"left behind: {place.files_left()[:8]}")


def _await_watchdog(scene: Scene, event: Event) -> None:
    """A profile that was killed leaves its probes in for the stated time at most."""
    began, end = time.monotonic(), time.monotonic() + WATCHDOG_S + 5.0
    while scene.place.armed() and time.monotonic() < end:
        time.sleep(0.05)
    if scene.place.armed():
        event.faults.append(f"armed {WATCHDOG_S + 5.0:g} s after the controller has gone")
    elif time.monotonic() - began > 1.0:
        event.outcome += ", watchdog"


def drawn(rng: random.Random, number: int, kind: str, operation: str) -> Event:
    """An event whose moment is still a fraction of the operation's time (0..1.05)."""
    over_ssh = kind in OVER_SSH or (kind != "disk full" and number % 2 == 0)
    return Event(
        kind, operation, over_ssh, max(0.0, rng.uniform(-0.4, 1.0)) if kind == "disk full" else rng.uniform(0.0, 1.05)
    )
