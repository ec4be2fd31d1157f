"""Link directories: where controller and server processes meet."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.runtime.ring import start_ticks


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

    def update(self, **state: Any) -> int:
        """Change the wanted state in ``link.json`` atomically; returns the new generation."""
        document = self.document()
        generation = int(document["state"]["generation"]) + 1
        document["state"].update(state, generation=generation)
        try:
            write_private(self.path / "link.json", json.dumps(document).encode())
        except OSError as error:
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
            base = Path(tempfile.gettempdir()) / f"specmeter-{os.geteuid()}"
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
    device_events: bool = False,
) -> Link:
    """Make a link directory from a plan and its code (module name -> blob).

    ``command`` is stored as given: mask it first. ``armed``: the processes arm from their first import. ``capacity``:
    records a ring (32 bytes each). ``watchdog_s``: disarm by itself so long after the last ``beat``, 0 never.
    ``device_events``: points whose clock is the device also record CUDA events outside graph capture.
    Raises SpecmeterError when the id is taken or the folder cannot be used.
    """
    id = link_id or f"{time.strftime('%H%M%S')}-{secrets.token_hex(3)}"
    if not id or not all(letter.isalnum() or letter in "-_." for letter in id) or id.startswith("."):
        raise SpecmeterError(f"{id!r} cannot be a link id", "Letters, digits, '-', '_' and '.' only.")
    folder = (base or default_base()) / id
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise SpecmeterError(
            f"The link {id} exists already", f"{folder} is there.", "Choose another --link, or remove that folder."
        ) from None
    except OSError as error:
        raise unwritable(folder, error) from error
    state = {"armed": armed, "generation": 1 if armed else 0, "watchdog_s": watchdog_s, "mix": None, "detached": False}
    python = plan.get("python") or {}
    document = {
        "id": id,
        "created_ns": time.time_ns(),
        "python": python.get("executable"),
        "command": list(command),
        "capacity": capacity,
        "device_events": device_events,
        "state": state,
    }
    try:
        write_private(folder / "plan.json", json.dumps(plan).encode())
        (folder / "code").mkdir(mode=0o700)
        for module, blob in code.items():
            write_private(folder / "code" / f"{module}.bin", blob)
        write_private(folder / "link.json", json.dumps(document).encode())
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise unwritable(folder, error) from error
        raise
    return Link(id, folder)


def open_link(path: Path) -> Link:
    """An existing link directory. Raises SpecmeterError when it is none, or not private to this user."""
    if not path.is_dir():
        raise SpecmeterError(f"There is no link at {path}", next_step="`specmeter status` lists the links.")
    check_private(path)
    return Link(str(_read(path / "link.json")["id"]), path)


def find_link(name: str | None = None, base: Path | None = None) -> Link:
    """The link with that id or path, or the only one there is when ``name`` is None. Raises SpecmeterError."""
    if name and (os.sep in name or Path(name, "link.json").exists()):
        return open_link(Path(name))
    found = links(base)
    if name:
        for link in found:
            if link.id == name:
                return link
        known = ", ".join(link.id for link in found) or "none"
        raise SpecmeterError(f"There is no link {name}", f"Links of this user: {known}.")
    if len(found) == 1:
        return found[0]
    if not found:
        raise SpecmeterError("There is no link", "No server was started by `specmeter run` for this user.")
    raise SpecmeterError(
        f"There are {len(found)} links", "Which one is meant cannot be told.", f"Give --link: {_ids(found)}"
    )


def links(base: Path | None = None) -> list[Link]:
    """All links of this user, oldest first."""
    folder = base or default_base()
    entries = sorted(folder.glob("*/link.json"), key=lambda path: path.stat().st_mtime_ns)
    return [Link(path.parent.name, path.parent) for path in entries]


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
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
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
