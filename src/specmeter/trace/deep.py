"""Deep windows: N decode cycles of a live server under the profiler, joined to the points and cycles of its ring."""

from __future__ import annotations

import contextlib
import gzip
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmeter.errors import SpecmeterError
from specmeter.trace.build import Trace
from specmeter.trace.deep_build import build_window
from specmeter.trace.deep_join import Host, read_host
from specmeter.trace.deep_profile import read_profile
from specmeter.trace.deep_requests import load_requests, save_requests
from specmeter.trace.deep_window import KERNEL, MEMCPY, MEMSET, Columns, DeepWindow, kernel_columns, sync_columns
from specmeter.trace.plan import PlanIndex, index_plan
from specmeter.trace.regular import read_regular
from specmeter.trace.requests import Request
from specmeter.trace.ring import read_header, read_ring
from specmeter.trace.strict_json import parse_json
from specmeter.trace.whole import whole

__all__ = [
    "KERNEL",
    "MEMCPY",
    "MEMSET",
    "Columns",
    "DeepWindow",
    "kernel_columns",
    "load_deep",
    "save_deep",
    "sync_columns",
]

FOLDER = "deep"
_META = ".meta.json"
_MOST = 1 << 62
_INTEGERS = ("pid", "start", "rank", "id", "begin_ns", "end_ns", "first_cycle", "cycles")


def load_deep(folder: Path, trace: Trace | None = None) -> list[DeepWindow]:
    """The deep windows of a link or a run directory, in the order in which they were taken, lower ranks first.

    ``trace`` is the recording that they belong to; without it every cycle counts as a decode cycle in their cost. Empty
    where there are none. Raises SpecmeterError for a damaged window, ring or plan.
    """
    metas = [_read_meta(path) for path in sorted((folder / FOLDER).glob(f"*{_META}"))]
    if not metas:
        return []
    index, requests = index_plan(_plan(folder)), load_requests(folder / FOLDER)
    windows = [(meta, _with_requests(_load(folder, meta, index, trace), requests)) for meta in metas]
    windows.sort(key=lambda pair: (pair[0]["id"], pair[1].rank, pair[1].host, pair[1].pid))
    return [window for _meta, window in windows]


def window_begins(folder: Path) -> list[tuple[str, int, int]]:
    """Host, rank and the moment, host ns, from which on each window of a run slows its process; damaged ones are left
    out."""
    found = []
    for path in sorted((folder / FOLDER).glob(f"*{_META}")):
        with contextlib.suppress(SpecmeterError):
            meta = _read_meta(path)
            found.append((meta["host"], meta["rank"], meta.get("prepare_ns", [meta["begin_ns"]])[0]))
    return found


def save_deep(link_dir: Path, run_dir: Path, requests: Sequence[Request] = ()) -> int:
    """Copy a link's deep windows into a run directory, the profiler's files packed; gives how many.

    ``requests`` are those that ran during the windows. Raises NotSaved where the disk does not take them.
    """
    sources = sorted((link_dir / FOLDER).glob(f"*{_META}"))
    if not sources:
        return 0
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    for source in sources:
        raw = source.with_name(f"{source.name.removesuffix(_META)}.json")
        packed = folder / f"{raw.name}.gz"
        if raw.is_file() and not packed.exists():
            with (
                whole(packed, folder / f".{packed.name}.part") as part,
                raw.open("rb") as old,
                gzip.open(part, "wb", compresslevel=1) as new,
            ):
                shutil.copyfileobj(old, new, 1 << 20)
        with whole(folder / source.name, folder / f".{source.name}.part") as part:
            shutil.copyfile(source, part)
    if requests:
        save_requests(folder, requests)
    return len(sources)


def _load(folder: Path, meta: Mapping[str, Any], index: PlanIndex, trace: Trace | None) -> DeepWindow:
    raw = meta["path"].with_name(f"{meta['path'].name.removesuffix(_META)}.json")
    profile = read_profile(raw if raw.exists() else raw.with_name(f"{raw.name}.gz"))
    return build_window(profile, meta, _host(folder, meta, index), trace)


def _with_requests(window: DeepWindow, requests: Sequence[Request]) -> DeepWindow:
    mine = tuple(r for r in requests if r.end_ns >= window.begin_ns and r.send_ns <= window.end_ns)
    return replace(window, requests=mine)


def _host(folder: Path, meta: Mapping[str, Any], index: PlanIndex) -> Host | None:
    """The ring of the window's process, found by what its header says; None where it was not saved."""
    for path in sorted([*folder.glob("*.ring"), *(folder / "rings").glob("*.ring")]):
        header = read_header(path)
        if (header.pid, header.start_ticks) != (meta["pid"], meta["start"]) or header.boot_id != meta["boot_id"]:
            continue
        lanes = _lanes(path.with_suffix(".json"))
        return read_host(read_ring(path), index, lanes, meta["begin_ns"], meta["end_ns"])
    return None


def _lanes(path: Path) -> list[dict[str, Any]]:
    """The threads that a process's report names; none where it cannot be read."""
    try:
        lanes = parse_json(read_regular(path)).get("lanes")
    except (OSError, ValueError, AttributeError):
        return []
    lanes = lanes if isinstance(lanes, list) else []
    return [lane for lane in lanes if isinstance(lane, dict) and isinstance(lane.get("lane"), int)]


def _plan(folder: Path) -> dict[str, Any]:
    path = folder / "plan.json"
    try:
        plan = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise SpecmeterError(f"The plan {path} cannot be read", str(error)) from error
    return plan if isinstance(plan, dict) else {}


def _read_meta(path: Path) -> dict[str, Any]:
    """What the runtime says of a window, checked. Raises SpecmeterError."""
    try:
        meta = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise SpecmeterError(f"{path} cannot be read", str(error)[:300], "Record the window again.") from error
    why = ""
    if not isinstance(meta, dict) or meta.get("format") != 1:
        why = "It is of a format that is not known here"
    else:
        wrong = [key for key in _INTEGERS if not _number(meta.get(key))]
        wrong += [key for key in ("thread", "native_thread") if not _number(meta.get(key, -1))]
        wrong += [key for key in ("host", "boot_id", "activity") if not isinstance(meta.get(key), str)]
        wrong += ["cycles"] if "cycles" not in wrong and meta["cycles"] < 1 else []
        for key in ("start_marks", "stop_marks", "start_pairs", "stop_pairs"):
            wrong += [] if _numbers(meta.get(key, []), 2 if "marks" in key else 3) else [key]
        for key in ("prepare_ns", "start_ns", "stop_ns", "export_ns"):
            wrong += [] if key not in meta or _numbers([meta[key]], 2) else [key]
        why = f"Its {', '.join(wrong)} cannot be" if wrong else ""
    if why:
        raise SpecmeterError(f"{path} is damaged", f"{why}.", "Record the window again.")
    return {**meta, "path": path}


def _numbers(value: Any, width: int) -> bool:
    """Whether it is a list of lists of so many integers of 64 bits."""
    if not isinstance(value, list):
        return False
    rows = [row for row in value if isinstance(row, list) and len(row) == width]
    return len(rows) == len(value) and all(_number(item) for row in rows for item in row)


def _number(value: Any) -> bool:
    """Whether it is an integer that still has 64 bits when a moment is added to it."""
    return type(value) is int and abs(value) < _MOST
