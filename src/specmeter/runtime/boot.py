"""Starts the runtime in a process whose environment names a link (SPECMETER_LINK). Never raises."""

from __future__ import annotations

import os
import stat
import sys
from typing import Any, Optional

VARIABLE = "SPECMETER_LINK"
_runtime: Optional[Any] = None


def activate(link: Optional[str] = None) -> bool:
    """Start the runtime once a process, again after it was detached. Returns whether it is there.

    Failures go to standard error in one line.
    """
    global _runtime
    if _runtime is not None and not _runtime.detached:
        return True
    link = link or os.environ.get(VARIABLE)
    if not link:
        return False
    try:
        if not _trusted(link):
            return False
        from .process import Runtime

        runtime = Runtime(link)
        runtime.install()
        _runtime = runtime
    except Exception as error:
        _complain(f"the runtime did not start: {type(error).__name__}: {error}")
        return False
    return True


def current() -> Optional[Any]:
    """The process's Runtime, if it has one."""
    return _runtime


def _trusted(link: str) -> bool:
    """Code is loaded from the link, so it must be a private directory of this user or of root."""
    try:
        info = os.lstat(link)
    except OSError:
        return False  # the controller is gone and took the link with it
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022:
        _complain(f"{link} is not a private directory of this user: the runtime stays out")
        return False
    return True


def _complain(text: str) -> None:
    try:
        print(f"specmeter: {text}", file=sys.stderr)
    except Exception:
        pass
