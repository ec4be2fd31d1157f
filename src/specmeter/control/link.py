"""Link directories: where controller and server processes meet."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.runtime.report import overwrite
from specmeter.runtime.ring import start_ticks

_UNREADY = ".new"
# A deep window is asked for beside the thread that arms and disarms. Other processes: the link has one controller.
_updating = threading.RLock()


@dataclass(frozen=True)
class Link:
    """A link directory (0700) and its id."""

    id: str
    path: Path

    def document(self) -> dict[str, Any]:
        """The contents of ``link.json``. Raises SpecmeterError when the link is gone or damaged."""
        return _read(self.path / "link.json")

    def plan(self) -> dict[str, Any]:
        """The contents of ``plan.json``. Raises SpecmeterError when the link is gone or damaged."""
        return _read(self.path / "plan.json")

    def lives(self, pid: int, start: int) -> bool:
        """Whether the process of that pid and start time (clock ticks since boot) still runs."""
        return start_ticks(pid) == start and not is_zombie(pid)

    def update(self, *, in_place: bool = False, **state: Any) -> int:
        """Change the wanted state in ``link.json`` atomically; returns the new generation.

        ``in_place``: on a full disk into the room that the file has, for what has to go through there too. Raises
        SpecmeterError when it cannot be written.
        """
        with _updating:
            document = self.document()
            generation = int(document["state"]["generation"]) + 1
            document["state"].update(state, generation=generation)
            data = json.dumps(document).encode()
            try:
                write_private(self.path / "link.json", data)
            except OSError as error:
                full = in_place and error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not (full and overwrite(str(self.path / "link.json"), data)):
                    raise unwritable(self.path, error) from error
            return generation


def default_base() -> Path:
    """The folder that holds this user's links: below XDG_RUNTIME_DIR, else a private folder in the temporary one.

    Raises SpecmeterError when somebody else owns it, or it is a symbolic link or open to others.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = None
    try:
        if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
            base = Path(runtime) / "specmeter"
        else:
            base = _temporary() / f"specmeter-{os.geteuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SpecmeterError(
            f"The folder for links {base or ''} cannot be made".replace("  ", " "),
            f"{error.strerror}.",
            "Set XDG_RUNTIME_DIR or TMPDIR to a folder that you can write to.",
            Exit.ENVIRONMENT,
        ) from error
    check_private(base)
    return base


def _temporary() -> Path:
    """The temporary folder, by rights alone: ``tempfile`` writes to it, and names another one when the disk is full."""
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    for folder in map(Path, [*named, "/tmp", "/var/tmp"]):
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return folder.absolute()
    return Path(tempfile.gettempdir())


def check_private(path: Path) -> None:
    """Raise SpecmeterError unless ``path`` is a real directory of this user that no one else can write to."""
    info = path.lstat()
    reason = ""
    if not stat.S_ISDIR(info.st_mode):
        reason = "it is a symbolic link or no directory"
    elif info.st_uid != os.geteuid():
        reason = f"it belongs to user {info.st_uid}, you are {os.geteuid()}"
    elif info.st_mode & 0o077:
        reason = f"others have access to it (mode {info.st_mode & 0o777:o})"
    if reason:
        raise SpecmeterError(
            f"{path} cannot be trusted",
            f"{reason}; code that a server loads must not pass through it.",
            f"Look at it, then remove it or `chmod 700 {path}`.",
            Exit.REFUSED,
        )


def make_link(
    plan: Mapping[str, Any],
    code: Mapping[str, bytes],
    *,
    link_id: str | None = None,
    base: Path | None = None,
    command: Sequence[str] = (),
    armed: bool = False,
    capacity: int | None = None,
    watchdog_s: float = 0.0,
    device_events: bool | str = False,
    device_stamps: bool = False,
    mix: Mapping[str, Any] | None = None,
    nvtx: bool = False,
) -> Link:
    """Make a link directory from a plan and its code (module name -> blob).

    ``command`` is stored as given: mask it first. ``armed``: the processes arm from their first import. ``capacity``:
    records a ring (32 bytes each). ``watchdog_s``: disarm by itself so long after the last ``beat``, 0 never.
    ``device_events``: points whose clock is the device are also timed outside graph capture ("events", "stamps").
    ``device_stamps``: graphs get stamps as they are captured, armed or not (docs/device-time.md). ``mix``: {seed,
    permille}, with ``armed``: the probes go in and out at random per cycle. ``nvtx``: spans also push NVTX ranges.
    Raises SpecmeterError when the id is taken or the folder cannot be used. Killed at any moment, the link is whole or
    not there.
    """
    id = checked_id(link_id)
    folder = (base or default_base()) / id
    check_free(folder)
    state = {
        "armed": armed, "generation": 1 if armed else 0, "watchdog_s": watchdog_s, "detached": False,
        "mix": dict(mix) if mix else None, "nvtx": nvtx,
    }  # fmt: skip
    python = plan.get("python") or {}
    document = {
        "id": id,
        "created_ns": time.time_ns(),
        "python": python.get("executable"),
        "command": list(command),
        "capacity": capacity,
        "device_events": device_events,
        "device_stamps": device_stamps,
        "state": state,
    }
    sweep(folder.parent)
    unready = folder.with_name(f".{id}.{os.getpid()}-{start_ticks(os.getpid())}{_UNREADY}")
    try:
        unready.mkdir(mode=0o700)
        write_private(unready / "plan.json", json.dumps(plan).encode())
        (unready / "code").mkdir(mode=0o700)
        for module, blob in code.items():
            write_private(unready / "code" / f"{module}.bin", blob)
        write_private(unready / "link.json", json.dumps(document).encode())
        check_free(folder)
        unready.rename(folder)  # the whole link at once: one that was cut short is not there
    except BaseException as error:
        shutil.rmtree(unready, ignore_errors=True)
        if isinstance(error, OSError):
            raise unwritable(folder, error) from error
        raise
    return Link(id, folder)


def checked_id(link_id: str | None) -> str:
    """The id for a link, a new one if None. Raises SpecmeterError for one that cannot be a folder's name."""
    id = link_id or f"{time.strftime('%H%M%S')}-{secrets.token_hex(3)}"
    if not all(letter.isalnum() or letter in "-_." for letter in id) or id.startswith("."):
        raise SpecmeterError(f"{id!r} cannot be a link id", "Letters, digits, '-', '_' and '.' only.")
    return id


def check_free(folder: Path) -> None:
    """Raise SpecmeterError when a link with that folder is there already."""
    if folder.exists():
        raise SpecmeterError(
            f"The link {folder.name} exists already",
            f"{folder} is there.",
            "Choose another --link, or remove that folder.",
        )


def sweep(base: Path) -> None:
    """Remove what makers of links that were killed meanwhile have left there."""
    for path in base.glob(f".*{_UNREADY}"):
        pid, _, start = path.name.removesuffix(_UNREADY).rpartition(".")[2].partition("-")
        if pid.isdigit() and start.isdigit() and start_ticks(int(pid)) != int(start):
            shutil.rmtree(path, ignore_errors=True)


def open_link(path: Path) -> Link:
    """An existing link directory. Raises SpecmeterError when it is none, or not private to this user."""
    if not path.is_dir():
        raise SpecmeterError(f"There is no link at {path}", next_step="`specmeter status` lists the links.")
    check_private(path)
    return Link(str(_read(path / "link.json")["id"]), path)


def find_link(name: str | None = None, base: Path | None = None) -> Link:
    """The link with that id or path; when ``name`` is None the only one there is, or the only one with a live process.

    Raises SpecmeterError when there is none, or which one is meant cannot be told: a link that no process has used
    yet is waiting for one, so it may be meant too.
    """
    if name and (os.sep in name or Path(name, "link.json").exists()):
        return open_link(Path(name))
    found = links(base)
    if name:
        for link in found:
            if link.id == name:
                return link
        known = ", ".join(link.id for link in found) or "none"
        raise SpecmeterError(
            f"There is no link {name}", f"Links of this user: {known}.", "`specmeter status` shows them."
        )
    if not found:
        raise SpecmeterError("There is no link", "No server was started by `specmeter run` for this user.")
    standing = found if len(found) == 1 else [link for link in found if not _ended(link)]
    if len(standing) == 1:
        return standing[0]
    raise SpecmeterError(
        f"There are {len(found)} links", "Which one is meant cannot be told.", f"Give --link: {_ids(found)}"
    )


def _ended(link: Link) -> bool:
    """Whether it has had processes and none of them runs any more."""
    names = [path.stem.split("-") for path in entries(link.path, "*-*.json")]
    seen = [name for name in names if len(name) == 2 and all(part.isdigit() for part in name)]
    return bool(seen) and not any(link.lives(int(pid), int(start)) for pid, start in seen)


def links(base: Path | None = None) -> list[Link]:
    """All links of this user, oldest first."""
    folder = base or default_base()
    found = []
    for path in entries(folder, "*/link.json"):
        if not path.parent.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path.parent))
    return [Link(path.name, path) for _, path in sorted(found)]


def entries(folder: Path, pattern: str) -> list[Path]:
    """The paths of that pattern in a folder, sorted; none where it goes away meanwhile, as a link with its server."""
    try:
        return sorted(folder.glob(pattern))
    except FileNotFoundError:
        return []


def remove_link(link: Link) -> None:
    """Delete a link's directory with its rings. A process that still runs may be writing its report: tried again."""
    for _ in range(20):
        shutil.rmtree(link.path, ignore_errors=True)
        if not link.path.exists():
            return
        time.sleep(0.01)


def write_private(path: Path, data: bytes) -> None:
    """Write a file (0600) atomically. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_zombie(pid: int) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[0] in (b"Z", b"X")


def unwritable(path: Path, error: OSError) -> SpecmeterError:
    """The error of a link that cannot be written: a full disk, a file system that is read-only."""
    return SpecmeterError(
        f"The link {path} cannot be written",
        f"{error.strerror}. Nothing was changed.",
        "Make room there, or set XDG_RUNTIME_DIR or TMPDIR to another folder that you can write to.",
        Exit.ENVIRONMENT,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecmeterError(f"{path} cannot be read", str(error.strerror)) from error
    except ValueError as error:
        raise SpecmeterError(f"{path} is damaged", str(error)) from error
    if not isinstance(document, dict):
        raise SpecmeterError(f"{path} is damaged", "It is no JSON object.")
    return document


def _ids(found: Sequence[Link]) -> str:
    return ", ".join(link.id for link in found)
