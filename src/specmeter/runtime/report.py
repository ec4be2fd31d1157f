"""What one process tells about itself in PID-START.json."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any, Dict, Optional, Tuple

from .ring import start_ticks


def describe(runtime: Any) -> Dict[str, Any]:
    """The report of the process of ``runtime``: what is armed, refused, disarmed by itself, and what went wrong."""
    rank, world = rank_and_world()
    arming, recorder = runtime.arming, runtime.recorder
    swaps, ring, events = arming.swaps, recorder.ring, recorder.events
    armed = [id for swap in swaps if swap.state != "out" for id in swap.points if id not in arming.disarmed]
    lanes = [
        {"lane": lane, "ident": ident, "native_id": native_id(ident), "name": thread_name(ident)}
        for ident, lane in recorder.lanes.items()
    ]
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "start": start_ticks(os.getpid()),
        "python": sys.version.split()[0],
        "engine": (runtime.plan or {}).get("engine"),
        "rank": None if rank < 0 else rank,
        "world": None if world < 0 else world,
        "armed": arming.armed,
        "generation": runtime.generation,
        "detached": runtime.detached,
        "modules": runtime.modules,
        "points": sorted(id for swap in swaps for id in swap.points),
        "armed_points": sorted(armed),
        "refused": arming.refused,
        "disarmed": [{"point": id, "exception": text} for id, text in arming.disarmed.items()],
        "refused_values": {str(id): why for id, why in recorder.refused_values.items()},
        "in_flight": arming.in_flight,
        "lanes": lanes,
        "device_events": events.describe() if events is not None else None,
        "sampling": {"on": arming.mixing, **arming.mixer.describe()} if arming.mixer is not None else None,
        "nvtx": arming.ranges.describe() if arming.ranges is not None else None,
        "ring": os.path.basename(ring.path) if ring is not None else None,
        "knobs": runtime.knobs.describe(),
        "deep": runtime.deep.describe(),
        "faults": runtime.faults,
    }


def write_report(path: str, document: Dict[str, Any]) -> None:
    """Replace the report atomically (0600); on a full disk write it into the room it has already. Raises OSError."""
    temporary = f"{path}.new"
    data = json.dumps(document).encode()
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not overwrite(path, data):
            raise


def overwrite(path: str, data: bytes) -> bool:
    """Write JSON over what a file holds, filled up with spaces; False when its blocks are not enough for it.

    Not atomic for a reader of that moment, and only for a disk on which nothing else can be written.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(handle)
        if len(data) > max(info.st_size, info.st_blocks * 512):
            return False
        padded = data.ljust(info.st_size)
        return os.pwrite(handle, padded, 0) == len(padded)
    except OSError:
        return False
    finally:
        os.close(handle)


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
