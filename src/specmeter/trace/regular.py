"""Files of a run directory are regular files: a pipe or a device in their place is refused, never waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file (symbolic links followed) for reading. Raises OSError, for anything else too."""
    # O_NONBLOCK: opening a pipe that nobody writes to would wait without end.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "It is a folder, not a file.", str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a regular file.", str(path))


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, for anything else too."""
    with open_regular(path) as file:
        return file.read()
