"""Runs an operation in a forked child that is killed before or after its N-th call into the operating system.

Calls of builtin functions that touch files (modules ``posix``, ``fcntl`` and ``_io``) are counted by the profile hook,
once before and once after each call, so that every point between two such calls is met.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

WATCHED = {"posix", "fcntl", "_io"}


def kill_at(step: int, operation: Callable[[], Any]) -> bool:
    """Run ``operation`` in a forked child and kill it at event ``step`` (0: never). Gives whether it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            sys.setprofile(_counter(step))
            operation()
            code = 0
        finally:
            sys.setprofile(None)
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"the operation failed at step {step}"
    return False


def _counter(step: int) -> Callable[..., None]:
    seen = 0

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal seen
        if event not in ("c_call", "c_return"):
            return
        module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if module not in WATCHED:
            return
        seen += 1
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return profile
