"""The far end of a session: obeys messages on standard input, answers on standard output. Standard library of 3.9.

It is the links' controller and the servers' parent on its host, so that both end with it: when the stream ends, or the
other side was silent for GONE_S, probes are taken out, servers stopped, and links that were made here removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from specmeter import control
from specmeter.control.deep import deep_window
from specmeter.control.link import Link, find_link, links
from specmeter.control.prepare import prepare_link
from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.far_load import Drive, connect
from specmeter.hosts.far_rings import Shipper
from specmeter.hosts.far_server import FarServer, free_or_stated, variables
from specmeter.hosts.frames import Frames, StreamDamaged

GONE_S = 60.0
STOP_GRACE_S = 3.0
_MOST_ANSWER = 64 << 20
Message = dict[str, Any]
Reply = tuple[Message, bytes]


class Relay:
    """Everything that one session holds on this host."""

    def __init__(self, frames: Frames, folder: Path) -> None:
        self._frames = frames
        self._folder = folder
        self._shipper = Shipper(frames.write)
        self._servers: dict[int, FarServer] = {}
        self._drives: dict[int, Drive] = {}
        self._own: dict[str, Link] = {}
        self._armed: dict[str, Link] = {}
        self._found: dict[str, Link] = {}
        self._heard = time.monotonic()

    def serve(self) -> None:
        """Obey until the stream ends."""
        threading.Thread(target=self._guard, daemon=True).start()
        while True:
            try:
                read = self._frames.read()
            except (StreamDamaged, OSError, ValueError):
                return
            if read is None:
                return
            self._heard = time.monotonic()
            threading.Thread(target=self._obey, args=read, daemon=True).start()

    def finish(self) -> None:
        """Leave nothing behind."""
        self._shipper.close()
        for drive in list(self._drives.values()):
            drive.stop()
        for link in list(self._armed.values()):
            with contextlib.suppress(SpecmeterError, OSError):
                control.disarm(link, 2.0)
        for server in list(self._servers.values()):
            server.stop(STOP_GRACE_S)
        for link in list(self._own.values()):
            control.remove_link(link)

    def _guard(self) -> None:
        """End the process when nobody has been heard of for too long: a lost connection may never be told."""
        while time.monotonic() - self._heard < GONE_S:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    def _obey(self, message: Message, payload: bytes) -> None:
        number = message.get("id")
        try:
            do: Callable[[Message, bytes], Reply] = getattr(self, f"_do_{message['op']}")
            answer, data = do(message, payload)
            answer = {"id": number, "ok": answer}
        except SpecmeterError as error:
            answer, data = {"id": number, "error": error.as_json()}, b""
        except Exception as error:
            fault = {"what": f"The far side failed at {message.get('op')}.", "why": f"{type(error).__name__}: {error}"}
            answer, data = {"id": number, "error": {**fault, "next": "", "exit": int(Exit.INTERNAL)}}, b""
        with contextlib.suppress(OSError, ValueError):
            self._frames.write(answer, data)

    def _do_ping(self, message: Message, payload: bytes) -> Reply:
        return {"perf_counter_ns": time.perf_counter_ns(), "time_ns": time.time_ns()}, b""

    def _do_facts(self, message: Message, payload: bytes) -> Reply:
        uname = os.uname()
        facts = {"host": socket.gethostname(), "system": uname.sysname, "machine": uname.machine}
        return {**facts, "cpus": os.cpu_count(), "python": ".".join(map(str, sys.version_info[:3]))}, b""

    def _do_busy(self, message: Message, payload: bytes) -> Reply:
        from specmeter.bench.machine import busy_warning

        return {"warning": busy_warning()}, b""

    def _do_prepare(self, message: Message, payload: bytes) -> Reply:
        command = [str(word) for word in message["command"]]
        env = {**os.environ, **message["env"]}
        reason = control.why_not_up(command, env)
        if reason:
            why, step = reason, "Leave the option out."
            raise SpecmeterError("The probes cannot get into this server.", why, step, Exit.REFUSED)
        python, recipe = message["python"], message["recipe"]
        link = prepare_link(
            command,
            engine=message["engine"],
            python=Path(python) if python else None,
            recipe=Path(recipe) if recipe else None,
            device_events=message.get("device") is not None,
            device_stamps=message.get("device") == "stamps",
            env=env,
        )
        self._own[link.id] = self._found[link.id] = link
        return self._described(link), b""

    def _do_find(self, message: Message, payload: bytes) -> Reply:
        link = find_link(message["link"])
        self._found[link.id] = link
        return self._described(link), b""

    def _do_links(self, message: Message, payload: bytes) -> Reply:
        found = []
        for link in links():
            with contextlib.suppress(SpecmeterError):
                found.append(self._described(link))
                self._found[link.id] = link
        return {"links": found}, b""

    def _described(self, link: Link) -> Message:
        return {"link": link.id, "path": str(link.path), "plan": link.plan(), "document": link.document()}

    def _do_wait(self, message: Message, payload: bytes) -> Reply:
        link = self._found[message["link"]]
        found = control.wait_for_processes(link, int(message["count"]), float(message["timeout_s"]))
        return {"pids": [process.pid for process in found]}, b""

    def _do_watch(self, message: Message, payload: bytes) -> Reply:
        self._shipper.watch(self._found[message["link"]])
        return {}, b""

    def _do_collect(self, message: Message, payload: bytes) -> Reply:
        return {"lost": self._shipper.collect(message["link"])}, b""

    def _do_arm(self, message: Message, payload: bytes) -> Reply:
        link = self._found[message["link"]]
        drawn = message.get("sampling")
        ack = control.arm(
            link, float(message["timeout_s"]), message["watchdog_s"],
            sampling=control.Sampling(int(drawn["seed"]), int(drawn["permille"]), str(drawn["why"])) if drawn else None,
            nvtx=message.get("nvtx"),
        )  # fmt: skip
        if message["watchdog_s"] is not None:  # else it is to stay
            self._armed[link.id] = link
        return {"silent": [process.pid for process in ack.silent], "done": len(ack.done)}, b""

    def _do_beat(self, message: Message, payload: bytes) -> Reply:
        for link in list(self._armed.values()):
            control.beat(link)
        return {}, b""

    def _do_disarm(self, message: Message, payload: bytes) -> Reply:
        link = self._found[message["link"]]
        ack = control.disarm(link, float(message["timeout_s"]))
        self._armed.pop(link.id, None)
        return {"silent": [process.pid for process in ack.silent], "done": len(ack.done)}, b""

    def _do_deep(self, message: Message, payload: bytes) -> Reply:
        link = self._found[message["link"]]
        asked = deep_window(link, int(message["cycles"]), str(message["label"]), float(message["deadline_s"]))
        lost = {"failed": dict(asked.failed), "left_out": dict(asked.left_out)}
        facts = {"number": asked.id, "activity": asked.activity, "done": list(asked.done), "notes": list(asked.notes)}
        return {**facts, **lost}, b""

    def _do_deep_file(self, message: Message, payload: bytes) -> Reply:
        link, pid = self._found[message["link"]], int(message["pid"])
        end = f"{int(message['number'])}{'.meta' if message['part'] == 'meta' else ''}.json"
        [path] = (link.path / "deep").glob(f"{pid}-*-{end}")
        return {"start": int(path.name.split("-")[1])}, zlib.compress(path.read_bytes(), 1)

    def _do_remove(self, message: Message, payload: bytes) -> Reply:
        self._shipper.forget(message["link"])
        link = self._own.pop(message["link"], None)
        if link is not None:
            control.remove_link(link)
        return {}, b""

    def _do_start(self, message: Message, payload: bytes) -> Reply:
        command = [str(word) for word in message["command"]]
        env = {**os.environ, **message["env"]}
        if message["link"] is not None:
            env = control.launch_env(self._found[message["link"]], env)
        number = int(message["server"])
        server = FarServer(command, env, self._folder / f"server-{number}.log", self._frames.write, number)
        self._servers[number] = server
        from specmeter.trace.masking import secrets_of

        # For masking the log where it is kept: they stand in the log as they are.
        return {"pid": server.pid, "secrets": secrets_of(command, env)}, b""

    def _do_port(self, message: Message, payload: bytes) -> Reply:
        return {"port": free_or_stated(message["stated"], str(message["host"]))}, b""

    def _do_stop(self, message: Message, payload: bytes) -> Reply:
        server = self._servers.pop(int(message["server"]), None)
        return {"code": None if server is None else server.stop(float(message["grace_s"]))}, b""

    def _do_kill(self, message: Message, payload: bytes) -> Reply:
        server = self._servers.get(int(message["server"]))
        if server is not None:
            server.kill()
        return {}, b""

    def _do_variables(self, message: Message, payload: bytes) -> Reply:
        from specmeter.engines.guardian import descendants

        pid = int(message["pid"])
        return {"found": variables([pid, *descendants(pid)], message["names"])}, b""

    def _do_flags(self, message: Message, payload: bytes) -> Reply:
        from specmeter.tune.flags import engine_flags

        words = [str(word) for word in message["command"]]
        spec: Any = SimpleNamespace(command=tuple(words), env=message["env"], engine=message["engine"])
        found = engine_flags(spec)
        facts = {"source": found.source, "version": found.version, "fields": sorted(found.fields)}
        return {"choices": {flag: list(values) for flag, values in found.choices.items()}, **facts}, b""

    def _do_http(self, message: Message, payload: bytes) -> Reply:
        """One request to a server of this host, answered whole. ``failed`` says why there was no answer."""
        parts = urlsplit(message["url"])
        connection = connect(parts, float(message["timeout_s"]))
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request(message["method"], target, payload or None, message["headers"])
            response = connection.getresponse()
            body = response.read(_MOST_ANSWER)
            return {"status": response.status, "headers": response.getheaders()}, body
        except TimeoutError as error:
            return {"failed": str(error) or "timed out", "timeout": True}, b""
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}", "timeout": "timed out" in str(error)}, b""
        finally:
            connection.close()

    def _do_drive(self, message: Message, payload: bytes) -> Reply:
        number, at, calls = int(message["drive"]), 0, []
        for size in message["sizes"]:
            calls.append(payload[at : at + size])
            at += size

        def done(outcome: Message, events: bytes) -> None:
            self._frames.write({"event": "outcome", "drive": number, **outcome}, events)

        drive = self._drives[number] = Drive(message, calls, done)
        try:
            return dict(drive.run()), b""
        finally:
            self._drives.pop(number, None)

    def _do_halt(self, message: Message, payload: bytes) -> Reply:
        drive = self._drives.get(int(message["drive"]))
        if drive is not None:
            drive.stop()
        return {}, b""


def main() -> int:
    """Serve one session."""
    # Nothing but frames may get into the stream.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def ended(number: int, frame: object) -> None:
        raise SystemExit

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, ended)
    folder = Path(tempfile.mkdtemp(prefix="session-", dir=sys.path[0]))
    relay = Relay(Frames(os.fdopen(0, "rb", 0), sink), folder)
    try:
        relay.serve()
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        relay.finish()
        shutil.rmtree(folder, ignore_errors=True)
    return 0
