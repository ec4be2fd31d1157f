"""Tables of a run directory: parquet where pyarrow is installed, else .npz with the same columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.trace.build import RankTrace, Trace
from specmeter.trace.cycles import DROPS, KINDS
from specmeter.trace.regular import open_regular
from specmeter.trace.requests import Request
from specmeter.trace.shape import check_table
from specmeter.trace.whole import whole

Columns = dict[str, NDArray[Any]]


def cycle_columns(trace: Trace) -> Columns:
    """The cycles of all ranks, one row each; ``missed_rank`` is a column where the engine tells it of some cycle."""
    parts = [_cycles(rank, trace.requests) for rank in trace.ranks]
    if any((rank.cycles.missed_rank >= 0).any() for rank in trace.ranks):
        for part, rank in zip(parts, trace.ranks, strict=True):
            part["missed_rank"] = rank.cycles.missed_rank
    return _join(parts)


def span_columns(trace: Trace) -> Columns:
    """The spans of all ranks, one row each; ``inside`` is false for work beside the cycle."""
    names = np.array(trace.index.names or ("",))
    parts = []
    for rank in trace.ranks:
        for spans in rank.spans:
            parts.append(
                {
                    "host": np.full(len(spans.cycle), rank.host),
                    "pid": np.full(len(spans.cycle), spans.pid, np.int64),
                    "rank": np.full(len(spans.cycle), rank.rank, np.int32),
                    "cycle": spans.cycle,
                    "point": names[spans.name],
                    "step": spans.step,
                    "clock": np.full(len(spans.cycle), "host"),
                    "t0_ns": spans.t0_ns,
                    "dur_ns": spans.dur_ns,
                    "self_ns": spans.self_ns,
                    "inside": spans.inside,
                }
            )
    return _join(parts)


def request_columns(requests: Sequence[Request]) -> Columns:
    """The requests, one row each, under the names of Request's fields."""
    texts = ("request_id", "prompt_id", "setting", "error")
    fields = tuple(Request.__dataclass_fields__)
    return {
        name: np.array([getattr(r, name) for r in requests], dtype=str if name in texts else np.int64)
        for name in fields
    }


def write_table(folder: Path, name: str, columns: Columns) -> Path:
    """Write one table into a folder, whole or not at all; gives the file's path. Raises NotSaved on a full disk."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        path = folder / f"{name}.npz"
        with whole(path, folder / f".{name}.part.npz") as part:
            np.savez(part, **columns)  # type: ignore[arg-type]
    else:
        path = folder / f"{name}.parquet"
        with whole(path, folder / f".{name}.part.parquet") as part:
            parquet.write_table(arrow.table({key: arrow.array(value) for key, value in columns.items()}), part)
    return path


def read_table(folder: Path, name: str) -> Columns:
    """Read a table; an empty dict where the run has none. Raises SpecmeterError for an unreadable or damaged one."""
    columns = _stored(folder, name)
    check_table(folder, name, columns)
    return columns


def read_rank(folder: Path, name: str, columns: Sequence[str], rank: tuple[str, int]) -> Columns:
    """Some columns of a table, of one rank (its host and number): a long trace as a whole would fill the memory."""
    host, number = rank
    found = _stored(folder, name, columns, [[("rank", "==", number), ("host", "==", host)]])
    return _checked(folder, name, found, columns)


def read_windows(folder: Path, windows: Sequence[tuple[int, int]], columns: Sequence[str]) -> Columns:
    """Some columns of the spans of every rank that begin in one of some windows of time, ns."""
    if not windows:
        return {}
    found = _stored(folder, "spans", columns, [[("t0_ns", ">=", a), ("t0_ns", "<", b)] for a, b in windows])
    return _checked(folder, "spans", found, columns)


def shared_ranks(cycles: Columns, leading: bool = False) -> list[tuple[str, int]]:
    """The ranks (host, number) under which a table of cycles has more than one process, as earlier versions wrote it.

    A rank's cycles are numbered from 0 on, so a number that is there twice tells. ``leading``: of the first rank alone.
    """
    pairs = dict.fromkeys(zip(cycles["host"].tolist(), cycles["rank"].tolist(), strict=True))
    found = []
    for host, rank in list(pairs)[: 1 if leading else None]:
        numbers = cycles["cycle"][(cycles["host"] == host) & (cycles["rank"] == rank)]
        if len(np.unique(numbers)) < len(numbers):
            found.append((str(host), int(rank)))
    return found


def _checked(folder: Path, name: str, found: Columns, columns: Sequence[str]) -> Columns:
    check_table(folder, name, found, columns)
    return found


# One condition is (column, operator, value); all of an inner list must hold, of one inner list at least.
_Filters = list[list[tuple[str, str, Any]]]
_HOLDS = {"==": np.equal, ">=": np.greater_equal, "<": np.less}


def _stored(folder: Path, name: str, columns: Sequence[str] | None = None, filters: _Filters | None = None) -> Columns:
    npz, parquet_path = folder / f"{name}.npz", folder / f"{name}.parquet"
    try:
        if npz.exists():
            with open_regular(npz) as file, np.load(file, allow_pickle=False) as stored:
                return _narrowed({key: stored[key] for key in stored.files}, columns, filters)
        if parquet_path.exists():
            import pyarrow.parquet as parquet

            open_regular(parquet_path).close()
            table = parquet.read_table(parquet_path, columns=columns and list(columns), filters=filters)
            return {key: table[key].to_numpy() for key in table.column_names}
    except ImportError as error:
        raise SpecmeterError(
            f"{parquet_path} needs pyarrow", next_step="pip install -e '.[data]' in the checkout"
        ) from error
    except Exception as error:
        raise SpecmeterError(f"The table {name} in {folder} cannot be read", str(error)) from error
    return {}


def _narrowed(whole: Columns, columns: Sequence[str] | None, filters: _Filters | None) -> Columns:
    """What Parquet does while it reads, for a table that was read as a whole."""
    if filters is None:
        return whole
    keep = np.zeros(len(next(iter(whole.values()))), bool)
    for conditions in filters:
        keep |= np.logical_and.reduce([_HOLDS[sign](whole[key], value) for key, sign, value in conditions])
    return {key: whole[key][keep] for key in columns or whole if key in whole}


def _cycles(rank: RankTrace, requests: Sequence[Request]) -> Columns:
    table, count = rank.cycles, len(rank.cycles)
    settings = np.array([*(r.setting for r in requests), ""])
    prompts = np.array([*(r.prompt_id for r in requests), ""])
    blocks = np.array([*(r.block for r in requests), -1], np.int32)
    return {
        "host": np.full(count, rank.host),
        "rank": np.full(count, rank.rank, np.int32),
        "cycle": np.arange(count, dtype=np.int64),
        "t0_ns": table.t0_ns,
        "dur_ns": table.dur_ns,
        "kind": np.array(KINDS)[table.kind],
        "batch": table.batch,
        "steps": table.steps,
        "drafted": table.drafted,
        "accepted": table.accepted,
        "sampled": table.sampled,
        "setting": settings[table.request],
        "block": blocks[table.request],
        "prompt_id": prompts[table.request],
        "dropped": np.array(DROPS)[table.drop],
        "probed": table.probed,
    }


def _join(parts: list[Columns]) -> Columns:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts else {}
