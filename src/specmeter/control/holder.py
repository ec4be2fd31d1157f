"""Who controls a link: two people at one server do not arm and disarm against each other.

A controller holds ``LINK/lock`` (flock) from arming to disarming or to its end, however it ends. ``link.json`` keeps
who armed last, so that arming by a command that has ended is attributed too. Reading rings and reports needs no lock.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmeter.control.link import Link, unwritable
from specmeter.errors import Exit, SpecmeterError
from specmeter.runtime.ring import start_ticks

# What makes a controller the same one: a person's second window counts as another, being idempotent costs nothing.
_IDENTITY = ("user", "sudo_user", "host", "address", "terminal")
_TRIES = 150
_PAUSE_S = 0.02
_held: dict[Path, int] = {}


def whoami() -> dict[str, Any]:
    """This controller: user, sudo_user, host, address (of an SSH client), terminal, pid, start, command, since_ns."""
    words = [Path(word).name for word in sys.argv[:1]] + [word for word in sys.argv[1:2] if word.isalpha()]
    return {
        "user": _user(),
        "sudo_user": os.environ.get("SUDO_USER"),
        "host": socket.gethostname(),
        "address": (os.environ.get("SSH_CONNECTION") or "").partition(" ")[0] or None,
        "terminal": _terminal(),
        "pid": os.getpid(),
        "start": start_ticks(os.getpid()),
        "command": " ".join(words),  # arguments may hold keys
        "since_ns": time.time_ns(),
    }


def take(link: Link, take_over: bool = False) -> dict[str, Any]:
    """Become the link's controller, for arming. Gives who this is, for ``link.json``.

    Raises SpecmeterError with exit 3 while another controller runs, or when somebody else's arming stands and
    ``take_over`` is false.
    """
    me = whoami()
    _lock(link, me)
    state = link.document()["state"]
    other = state.get("armed_by")
    # A controller that beats holds the lock: it has ended, and the watchdog ends its arming.
    stale = bool(other and other.get("beats"))
    if state["armed"] and other and not stale and not take_over and not _same(other, me):
        release(link)
        raise SpecmeterError(
            f"Link {link.id} was armed by somebody else.",
            f"{describe(other)}.",
            "Ask them; `specmeter status` and `specmeter top` read along meanwhile. --take-over arms as yours.",
            Exit.REFUSED,
        )
    return me


def check_disarm(link: Link, take_over: bool = False) -> None:
    """Raise SpecmeterError with exit 3 while another controller runs and ``take_over`` is false."""
    if link.path in _held or take_over:
        return
    _lock(link, whoami(), nameless=True)
    release(link)


def release(link: Link) -> None:
    """Give the lock back, if this process holds it."""
    handle = _held.pop(link.path, None)
    if handle is not None:
        os.close(handle)


def holder(link: Link) -> dict[str, Any] | None:
    """The controller that runs now, as it described itself, or None."""
    if link.path in _held:
        return _read(link)
    try:
        handle = os.open(link.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read(link)
    finally:
        os.close(handle)
    return None


def describe(who: Mapping[str, Any]) -> str:
    """One line: who, from where, with what, since when."""
    if not who:
        return "who it is could not be written: the disk is full"
    user = f"{who.get('user')}@{who.get('host')}"
    if who.get("sudo_user"):
        user += f" ({who['sudo_user']} by sudo)"
    places = [f"ssh from {who['address']}"] if who.get("address") else []
    places += [str(who["terminal"])] if who.get("terminal") else []
    since = int(who.get("since_ns") or 0)
    minutes = max(0, time.time_ns() - since) / 60e9
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since / 1e9))
    place = f", {', '.join(places)}" if places else ""
    return f"{user}{place}, `{who.get('command')}` (process {who.get('pid')}), since {at} ({minutes:.0f} min)"


def _only_looked_at(handle: int) -> bool:
    """Whether it is no controller that holds the lock: `status` looks with a shared one, on a busy machine for long."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(handle, fcntl.LOCK_UN)
    return True


def _lock(link: Link, me: Mapping[str, Any], nameless: bool = False) -> None:
    """Take the lock; ``nameless`` also where the disk is too full to say who has it: probes must come out there."""
    if link.path in _held:
        return
    try:
        handle = os.open(link.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritable(link.path, error) from error
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            # Whoever disarms without being the controller holds it for a moment.
            if left and (left > _TRIES - 5 or _only_looked_at(handle)):
                time.sleep(_PAUSE_S)
                continue
            os.close(handle)
            who = _read(link) or {}
            raise SpecmeterError(
                f"Link {link.id} is under the control of somebody else.",
                f"{describe(who)}.",
                "Wait until it ends; `specmeter status` and `specmeter top` read along meanwhile.",
                Exit.REFUSED,
            ) from None
    text = json.dumps(dict(me)).encode()
    try:
        os.pwrite(handle, text, 0)  # over what is there: a full disk has no room for more
        os.ftruncate(handle, len(text))
    except OSError as error:
        if not nameless:
            os.close(handle)
            raise unwritable(link.path, error) from error
        os.ftruncate(handle, 0)
    _held[link.path] = handle


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in _IDENTITY)


def _read(link: Link) -> dict[str, Any] | None:
    try:
        document = json.loads((link.path / "lock").read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _terminal() -> str | None:
    for handle in (0, 1, 2):
        try:
            return os.ttyname(handle)
        except OSError:
            continue
    return None
