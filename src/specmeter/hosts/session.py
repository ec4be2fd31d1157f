"""Runs one command on a host: everything it needs goes over in one stream, and its output comes back as it is made."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.address import SSH_OPTIONS, Host
from specmeter.hosts.bundle import COMMANDS, RELAY, bundle
from specmeter.hosts.client import (
    MOST_NOISE,
    START_S,
    Client,
    NotBegun,
    end_client,
    read_in_time,
    signals_end_it,
    start_client,
)
from specmeter.hosts.dispatch import FROM_HERE
from specmeter.reporters.inert import inert_lines

_END_WAIT_S = 15
_ERRORS_WAIT_S = 2  # a control master of ssh stays, and holds the stream open
_LINE = 1 << 16
_COLOUR = re.compile("\x1b\\[[0-9;:]*m")


def run_on(host: Host, python: str, arguments: Sequence[str]) -> int:
    """Run ``specmeter ARGUMENTS`` on ``host`` under its ``python``; prints its output, gives its exit code.

    Raises SpecmeterError: exit 2 for a command that cannot run there, 5 when the host or its Python cannot be
    reached, 4 when the connection ended in between.
    """
    command = next((word for word in arguments if not word.startswith("-")), "")
    if command not in COMMANDS:
        raise SpecmeterError(
            f"`specmeter {command}` does not run on another host yet.",
            f"Those that do: {', '.join((*COMMANDS, *FROM_HERE))}.",
        )
    with signals_end_it():
        return _run_on(host, python, arguments, command)


def _run_on(host: Host, python: str, arguments: Sequence[str], command: str) -> int:
    token = secrets.token_hex(8)
    child, held = start_client(host, python)
    assert child.stdin and child.stdout and child.stderr
    reader, late = _Reader(child.stdout, token), ""
    errors = Errors(child.stderr, token)
    try:
        held.release()
        writer = threading.Thread(target=send, args=(child.stdin, token, python, arguments, command), daemon=True)
        writer.start()
        reader.copy()
    except NotBegun as error:
        late = str(error)
    except KeyboardInterrupt:
        if reader.started:
            writer.join(_ERRORS_WAIT_S)
            if not writer.is_alive():
                child.stdin.close()
                reader.copy_rest(child, _END_WAIT_S)
        raise
    finally:
        if reader.code is None and reader.started:
            child.terminate()
        # Nothing has begun there: there is nothing to tidy up.
        code = end_client(child, _END_WAIT_S if reader.started or reader.ended else 0.0)
        errors.join(_ERRORS_WAIT_S)
    if late:
        raise not_begun(host, late, errors.lines)
    if not reader.started:
        raise unreachable(host, python, code, errors.lines)
    if reader.code is None:
        raise _dropped(host, command, errors.lines)
    if Exit.USAGE <= reader.code <= Exit.ENVIRONMENT and any(line.startswith("specmeter: ") for line in errors.lines):
        print(f"  on:   {inert_lines(host.name)}", file=sys.stderr)  # below the error that came from there
    return reader.code


def send(stream: IO[bytes], token: str, python: str, arguments: Sequence[str], command: str) -> None:
    """Write program, header and archive; the stream stays open, for its end means that nobody waits any more."""
    program = (Path(__file__).parent / "far_start.py").read_bytes()
    facts = {"token": token, "python": python, "arguments": list(arguments), "relay": command == RELAY}
    header = json.dumps(facts).encode()
    archive = bundle(command)
    program += b"\nimport json\nr = sys.stdin.buffer\nmain(json.loads(r.read(%d).decode()), r.read(%d))\n" % (
        len(header),
        len(archive),
    )
    try:
        stream.write(b"%d\n" % len(program) + program + header + archive)
        stream.flush()
    except OSError:
        pass  # the reader sees the end and says why


class _Reader:
    """Copies the far output between two marks; what a login shell prints before the first one is dropped."""

    def __init__(self, stream: IO[bytes], token: str) -> None:
        self.started = False
        self.ended = False
        self.code: int | None = None
        self._stream = stream
        self._mark = f"\0specmeter {token} ".encode()

    def copy(self) -> None:
        """Copy to standard output until the second mark or the end. Raises NotBegun."""
        until, waiting = time.monotonic() + START_S, b""
        while True:
            if self.started:
                data = os.read(self._stream.fileno(), 65536)
            else:
                data = read_in_time(self._stream, 65536, until)
            waiting += data
            if not self.started:
                before, mark, rest = waiting.partition(self._mark + b"start\n")
                if mark:
                    self.started, waiting = True, rest
                elif len(waiting) > MOST_NOISE:
                    raise NotBegun(f"printed {MOST_NOISE >> 20} MiB and did not begin")
            if self.started:
                before, mark, rest = waiting.partition(self._mark)
                if mark and b"\n" in rest:
                    _write(before)
                    self.code = _code(rest)
                    return
                keep = len(waiting) - waiting.rfind(b"\0") if b"\0" in waiting else 0
                keep = keep if keep <= len(self._mark) + 16 else 0
                _write(waiting[: len(waiting) - keep])
                waiting = waiting[len(waiting) - keep :]
            if not data:
                self.ended = True
                _write(waiting if self.started else b"")
                return

    def copy_rest(self, child: Client, timeout_s: float) -> None:
        """After an interrupt: give the far side a while to end by itself."""
        timer = threading.Timer(timeout_s, child.terminate)
        timer.start()
        try:
            self.copy()
        finally:
            timer.cancel()


class Errors(threading.Thread):
    """Keeps the last lines of standard error; shows those that come after the mark, which are the command's own."""

    def __init__(self, stream: IO[bytes], token: str) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._stream = stream
        self._mark = f"\0specmeter {token} start"
        self.start()

    def run(self) -> None:
        """Read until the end. What is shown is inert: a terminal obeys more than it shows. Colours are left out."""
        started = False
        while raw := self._stream.readline(_LINE):
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if not started and self._mark in line:
                started = True
                self.lines = []
                continue
            self.lines = [*self.lines[-20:], line]
            if started:
                plain = _COLOUR.sub("", line).replace("\r", "\n")
                print(inert_lines(plain, _LINE), file=sys.stderr, flush=True)


def _code(rest: bytes) -> int | None:
    """The exit code of ``end CODE``, None if it is none."""
    words = rest.split(b"\n", 1)[0].split()
    digits = words[1] if len(words) == 2 and words[0] == b"end" else b""
    return int(digits) if digits.isdigit() and len(digits) < 4 and int(digits) < 256 else None


def _write(data: bytes) -> None:
    if data:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def unreachable(host: Host, python: str, code: int, lines: Sequence[str]) -> SpecmeterError:
    """Why nothing answered, from what the client said."""
    text = "\n".join(lines)
    last = next((line for line in reversed(lines) if line.strip()), f"it ended with code {code}")
    by_hand = shlex.join(word for word in host.prefix if word not in (*SSH_OPTIONS, "--"))
    steps = (
        (
            "host key verification failed",
            f"The host's key is not known or has changed: log in once with `{by_hand}`.",
        ),
        ("permission denied", "No key was accepted, and specmeter never asks for a password: load a key (ssh-add)."),
        ("could not resolve", "The name is unknown here: look at ~/.ssh/config."),
        ("timed out", "The host does not answer: is it up, and reachable from here (ProxyJump)?"),
        ("connection refused", "Nothing listens there: is the port right?"),
    )
    for words, step in steps:
        if words in text.lower():
            return SpecmeterError(f"{host.name} cannot be reached.", last, step, Exit.ENVIRONMENT)
    if "no attribute 'buffer'" in text:
        step = "Name a Python of 3.9 or later with --far-python EXE."
        return SpecmeterError(f"{python} on {host.name} is Python 2.", last, step, Exit.ENVIRONMENT)
    if code in (126, 127) or "not found" in text.lower() or "no such file" in text.lower():
        step = "specmeter needs nothing there but a Python: name it with --far-python EXE."
        return SpecmeterError(f"There is no {python} on {host.name}.", last, step, Exit.ENVIRONMENT)
    step = "Try the same by hand; the login must not start a program of its own."
    return SpecmeterError(f"{host.name} did not run {python}.", last, step, Exit.ENVIRONMENT)


def not_begun(host: Host, how: str, lines: Sequence[str]) -> SpecmeterError:
    """The error for NotBegun, with the client's last words."""
    last = next((line for line in reversed(lines) if line.strip()), "It said nothing on standard error.")
    step = "Try the same by hand: the prefix must run the words that are appended to it, and read standard input."
    return SpecmeterError(f"{host.name} {how}.", last, step, Exit.ENVIRONMENT)


def _dropped(host: Host, command: str, lines: Sequence[str]) -> SpecmeterError:
    last = next((line for line in reversed(lines) if line.strip()), "the connection ended before the answer was whole")
    step = f"The far side ends the command and removes its folder by itself; see `specmeter --on {host.name!r} status`."
    if command == "patch":
        step = f"A patch is whole or not there: see `specmeter --on {host.name!r} patch status`."
    return SpecmeterError(f"The connection to {host.name} was lost.", last, step, Exit.SERVER_FAILED)
