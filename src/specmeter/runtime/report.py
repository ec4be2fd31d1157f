"""What one process tells about itself in PID-START.json."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, Optional, Tuple


def write_report(path: str, document: Dict[str, Any]) -> None:
    """Replace the report atomically (0600). Raises OSError."""
    temporary = f"{path}.new"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(document, file)
    os.replace(temporary, path)


def rank_and_world() -> Tuple[int, int]:
    """The process's rank and world size, from torch.distributed if it is up, else from RANK and WORLD_SIZE, else -1."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:
        pass  # half set up: the environment may still know
    return _number("RANK"), _number("WORLD_SIZE")


def thread_name(ident: int) -> Optional[str]:
    """The name of a thread of the ``threading`` module, if that is loaded and knows it."""
    threading = sys.modules.get("threading")
    thread = getattr(threading, "_active", {}).get(ident) if threading is not None else None
    return str(thread.name) if thread is not None else None


def native_id(ident: int) -> Optional[int]:
    """The kernel's id of a thread of the ``threading`` module."""
    threading = sys.modules.get("threading")
    thread = getattr(threading, "_active", {}).get(ident) if threading is not None else None
    native = getattr(thread, "native_id", None)
    return int(native) if native is not None else None


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else -1
