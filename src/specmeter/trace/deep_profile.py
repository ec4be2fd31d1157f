"""What torch's profiler exported, as columns: host calls into the device's runtime, device activities, operators.

The format is the Chrome trace that libkineto writes: ``ts`` and ``dur`` in microseconds, ``ts`` since
``baseTimeNanoseconds`` of the calendar where that is given; ``args.correlation`` joins a call to what it launched.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.trace.deep_window import KERNEL, MEMCPY, MEMSET, Columns
from specmeter.trace.regular import open_regular

MOST_BYTES = 4 << 30
_HOST, _DEVICE, _OPERATOR = range(3)
_GROUPS = {
    "cuda_runtime": (_HOST, 0),
    "cuda_driver": (_HOST, 0),
    "kernel": (_DEVICE, KERNEL),
    "gpu_memcpy": (_DEVICE, MEMCPY),
    "gpu_memset": (_DEVICE, MEMSET),
    "cpu_op": (_OPERATOR, 0),
}
# Bytes of an element by the names that torch gives types in the arguments of collectives.
_SIZES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long"), 8),
}
MOST_US = 4.1e15  # since 1970, where no base is given
MOST_BASE = 1 << 62
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Profile:
    """An exported window. All times are ns of the calendar as the profiler knows it, each table in order of ``t0_ns``.

    ``host`` and ``operators``: ``name`` (index in ``names``), ``t0_ns``, ``dur_ns``, ``thread`` (as recorded: the
    system's id, or the lower 32 bits of the pthread's), ``correlation``. ``device``: ``name``, ``kind``, ``t0_ns``,
    ``dur_ns``, ``stream`` (with the device's number above 32 bits where there are several), ``correlation``, ``bytes``.
    """

    names: tuple[str, ...]
    host: Columns
    device: Columns
    operators: Columns

    def named(self, table: Columns, *names: str) -> NDArray[np.bool_]:
        """Which rows of a table have one of these names."""
        wanted = [index for index, name in enumerate(self.names) if name in names]
        found: NDArray[np.bool_] = np.isin(table["name"], wanted)
        return found

    def holding(self, table: Columns, *parts: str) -> NDArray[np.bool_]:
        """Which rows of a table have a name that holds one of these parts."""
        wanted = [index for index, name in enumerate(self.names) if any(part in name for part in parts)]
        found: NDArray[np.bool_] = np.isin(table["name"], wanted)
        return found


def read_profile(path: Path) -> Profile:
    """Read an exported window (also .gz). Raises SpecmeterError when it is none, or damaged."""
    with _uncollected():
        return _profile(path, _read(path))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector, which looks again and again at new objects that all stay: more than half of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _profile(path: Path, document: dict[str, Any]) -> Profile:
    base = document.get("baseTimeNanoseconds", 0)
    events = document.get("traceEvents")
    if not isinstance(events, list) or type(base) is not int or not 0 <= base < MOST_BASE:
        _damaged(path, "It has no list of traceEvents, or its baseTimeNanoseconds is no time")
    rows: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    names: dict[str, int] = {}
    try:
        for event in events:
            group, kind = _GROUPS.get(event.get("cat", ""), (-1, 0))
            if group < 0 or event["ph"] != "X":
                continue
            args = event.get("args") or _NOTHING
            name = names.setdefault(event["name"], len(names))
            if group == _DEVICE:
                extra = (args.get("stream", event["tid"]), args.get("device", 0), kind, _bytes(args))
            else:
                extra = (event["tid"], 0, 0, -1)
            rows[group].append((name, event["ts"], event["dur"], args.get("correlation", -1), *extra))
        tables = [_table(part, base) for part in rows]
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        _damaged(path, f"An event of it is malformed ({type(error).__name__}: {error})"[:300])
    if not all(isinstance(name, str) for name in names):
        _damaged(path, "An event's name is no text")
    host, device, operators = tables
    return Profile(tuple(names), _as_host(host), _as_device(device), _as_host(operators))


def _table(rows: Sequence[tuple[Any, ...]], base: int) -> Columns:
    """Rows (name, ts, dur, correlation, place, device, kind, bytes) as columns. Raises ValueError for bad numbers."""
    parts = list(zip(*rows, strict=True)) if rows else [()] * 8
    name = np.array(parts[0], np.int32)
    ts, dur = (np.array(part, np.float64) for part in parts[1:3])
    # NaN fails every comparison.
    if not ((np.abs(ts) < MOST_US).all() and (dur >= 0).all() and (dur < MOST_US).all()):
        raise ValueError("a time that is no number, below 0 or beyond this century")
    t0 = np.rint(ts * 1000).astype(np.int64) + base
    numbers = [np.array(part, np.int64) for part in parts[3:]]
    order = np.argsort(t0, kind="stable")
    columns: list[NDArray[Any]] = [name, t0, np.rint(dur * 1000).astype(np.int64), *numbers]
    keys = ("name", "t0_ns", "dur_ns", "correlation", "place", "device", "kind", "bytes")
    return {key: column[order] for key, column in zip(keys, columns, strict=True)}


def _as_host(table: Columns) -> Columns:
    return {
        **{key: table[key] for key in ("name", "t0_ns", "dur_ns", "correlation")},
        "thread": table["place"],
    }


def _as_device(table: Columns) -> Columns:
    several = len(np.unique(table["device"])) > 1
    stream = table["place"] + (table["device"] << 32) if several else table["place"]
    return {
        **{key: table[key] for key in ("name", "t0_ns", "dur_ns", "correlation", "bytes")},
        "kind": table["kind"].astype(np.int8),
        "stream": stream,
    }


def _bytes(args: Mapping[str, Any]) -> int:
    """Bytes of a copy or fill, or of a collective that tells its elements; -1 where they are not told."""
    if "bytes" in args:
        return int(args["bytes"])
    elements, size = args.get("In msg nelems"), _SIZES.get(str(args.get("dtype")))
    return int(elements) * size if elements is not None and size else -1


def _read(path: Path) -> dict[str, Any]:
    try:
        with (
            open_regular(path) as file,
            gzip.open(file) if path.suffix == ".gz" else contextlib.nullcontext(file) as opened,
        ):
            raw = opened.read(MOST_BYTES + 1)  # a few packed bytes can stand for any number
        if len(raw) > MOST_BYTES:
            raise SpecmeterError(f"{path} is larger than 4 GiB", next_step="Record a shorter window.")
        document = json.loads(raw, parse_constant=_refused)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecmeterError(f"The deep window {path} cannot be read", reason[:300], "Record it again.") from error
    if not isinstance(document, dict):
        _damaged(path, "It is no JSON object")
    return document


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _damaged(path: Path, why: str) -> NoReturn:
    raise SpecmeterError(
        f"The deep window {path} is damaged", f"{why}.", "Leave it out, or record again; its numbers are not shown."
    )
