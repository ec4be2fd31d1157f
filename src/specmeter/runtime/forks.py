"""Tells the runtime of a process about forks. Handlers cannot be taken back, so they are registered once a process."""

from __future__ import annotations

import os
from typing import Any, List

_following: List[Any] = []
_registered = False


def follow(runtime: Any) -> None:
    """Call ``before_fork``, ``after_fork`` and ``in_child`` of ``runtime`` from now on."""
    global _registered
    _following.append(runtime)
    if not _registered:
        os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_child)
        _registered = True


def leave(runtime: Any) -> None:
    """Call them no more."""
    _following[:] = [item for item in _following if item is not runtime]


def _before() -> None:
    _tell("before_fork")


def _after() -> None:
    _tell("after_fork")


def _child() -> None:
    _tell("in_child")


def _tell(name: str) -> None:
    for runtime in list(_following):
        try:
            getattr(runtime, name)()
        except Exception:
            pass  # the server's fork comes first
