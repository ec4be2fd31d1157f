"""File operations of a patch, each of which either has happened or has not.

Nothing is ever written in place: a file is made beside the target, on the same file system, and renamed over it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List

Facts = Dict[str, Any]


class Refused(Exception):
    """Nothing was changed. ``why`` and ``next`` as in SpecmeterError; ``diff`` shows what somebody else changed."""

    def __init__(self, what: str, why: str = "", next: str = "", diff: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next
        self.diff = diff


def read(path: str) -> bytes:
    """The bytes of a regular file. Raises OSError, for anything else too."""
    # O_NONBLOCK: opening a pipe that nobody writes to would wait without end.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        thing, code = ("a folder", errno.EISDIR) if stat.S_ISDIR(mode) else ("a pipe or a device", errno.EINVAL)
        raise OSError(code, f"{thing} is in its place")
    with os.fdopen(handle, "rb") as file:
        return file.read()


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def facts_of(path: str) -> Facts:
    """Owner, mode, times and size of a file, as a manifest keeps them."""
    info = os.stat(path)
    return {
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mtime_ns": info.st_mtime_ns,
        "size": info.st_size,
        "links": info.st_nlink,
    }


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold the folder against other patching, until the end or the death of this process. Leaves no lock file."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise Refused(
                f"Another specmeter is patching in {folder}.",
                next="Wait for it, then look at `specmeter patch status`.",
            ) from None
        yield
    finally:
        os.close(handle)


def sync(path: str) -> None:
    """Have a file or folder on the disk before anything that relies on it."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(path: str, data: bytes) -> None:
    """Write a new private file (0600), and have it on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_like(path: str, data: bytes, model: str) -> None:
    """Write a new file with the owner, mode and extended attributes of ``model``. Raises OSError."""
    write_new(path, data)
    info = os.stat(model)
    mine = os.stat(path)
    if (mine.st_uid, mine.st_gid) != (info.st_uid, info.st_gid):
        os.chown(path, info.st_uid, info.st_gid)
    _copy_attributes(model, path)
    os.chmod(path, stat.S_IMODE(info.st_mode))
    sync(path)


def keep(path: str, backup: str) -> None:
    """Keep the file itself under a second name; a copy with owner, mode and times where links are not possible."""
    try:
        os.link(path, backup)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES):
            raise
        write_like(backup, read(path), path)
        shutil.copystat(path, backup)


def compiled_files(path: str) -> List[str]:
    """The byte code that Python may load in place of ``path``, of every version and -O level."""
    folder, name = os.path.split(path)
    stem = os.path.splitext(name)[0]
    cache = os.path.join(folder, "__pycache__")
    try:
        names = os.listdir(cache)
    except OSError:
        return []
    return sorted(os.path.join(cache, item) for item in names if item.startswith(f"{stem}.") and item.endswith(".pyc"))


def remove(path: str) -> None:
    """Remove a file that may be gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def check_target(path: str) -> None:
    """Raise Refused unless the file can be replaced with its owner and mode kept, saying what stands in the way."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise Refused(f"{path} cannot be patched.", f"{error.strerror}.", _elsewhere()) from None
    folder = os.path.dirname(path)
    if not stat.S_ISREG(info.st_mode):
        raise Refused(f"{path} cannot be patched.", "It is no regular file.", _elsewhere())
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise Refused(
            f"{path} cannot be patched.",
            "Its file system is mounted read-only (an image, a snapshot, or /nix/store).",
            "Mount it read-write, or work on a copy of the environment; " + _elsewhere(),
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        owner, mode = os.stat(folder).st_uid, stat.S_IMODE(os.stat(folder).st_mode)
        raise Refused(
            f"{path} cannot be patched.",
            f"Its folder belongs to {user_name(owner)} (mode {mode:o}), and you are {user_name(os.geteuid())}.",
            f"Run this as {user_name(owner)}, or work on an environment of your own; " + _elsewhere(),
        )
    if info.st_uid != os.geteuid() and os.geteuid() != 0:
        raise Refused(
            f"{path} cannot be patched.",
            f"It belongs to {user_name(info.st_uid)}, and only root or that user can keep the owner.",
            f"Run this as {user_name(info.st_uid)}; " + _elsewhere(),
        )


def explain(path: str, error: OSError) -> Refused:
    """The refusal for an operation that failed after the checks; nothing was changed."""
    what = f"{path} cannot be patched: nothing was changed."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(what, f"The disk or the quota is full ({error.strerror}).", "Make room, then try again.")
    if error.errno == errno.EPERM:
        why = f"{error.strerror}: the file is immutable (`lsattr` shows an i), or its owner cannot be kept."
        return Refused(what, why, "`chattr -i` as root, then try again.")
    if error.errno == errno.EROFS:
        return Refused(what, "Its file system is read-only.", "Mount it read-write; " + _elsewhere())
    return Refused(what, f"{error.strerror or error}.", _elsewhere())


def user_name(uid: int) -> str:
    """A user's name with its number."""
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _elsewhere() -> str:
    return "`specmeter run` and `specmeter env` need no change on disk."


def _copy_attributes(source: str, target: str) -> None:
    """Extended attributes (SELinux labels, ACLs) as far as the file system and this user's rights go."""
    if not hasattr(os, "listxattr"):
        return
    try:
        names = os.listxattr(source)
    except OSError:
        return
    for name in names:
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError:
            continue
