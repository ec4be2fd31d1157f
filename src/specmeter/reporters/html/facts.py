"""What the page shows beyond analysis.json, reduced from a run's tables: distributions, sampled cycles, acceptance by
prompt. Tables are read column by column and rank by rank, so that a long trace does not fill the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.trace.plan import PHASES, phase_of
from specmeter.trace.tables import Columns, read_table

Floats = NDArray[np.float64]
BASELINE = "baseline"


@dataclass(frozen=True)
class Rank:
    """A rank's place: host and number (-1: not known)."""

    host: str
    rank: int

    @property
    def name(self) -> str:
        """``rank 3``, or ``server`` where the engine did not tell."""
        return f"rank {self.rank}" if self.rank >= 0 else "server"


@dataclass(frozen=True)
class Cycles:
    """The cycles of one rank in order of time, and which of them the analysis is over."""

    rank: Rank
    table: Columns
    chosen: NDArray[np.bool_]

    @property
    def ms(self) -> Floats:
        """The chosen cycles' lengths, ms."""
        return np.asarray(self.table["dur_ns"][self.chosen], float) / 1e6


def cycles_by_rank(folder: Path, setting: str | None) -> list[Cycles]:
    """The cycles of every rank, the leading one (lowest number) first; empty where the run has no table."""
    table = read_columns(folder, "cycles")
    if not table or not len(table["rank"]):
        return []
    hosts, ranks = np.asarray(table["host"], str), np.asarray(table["rank"])
    places = sorted({(int(r), h) for h, r in set(zip(hosts.tolist(), ranks.tolist(), strict=True))})
    failed = _failed(folder)
    found = []
    for number, host in sorted(places, key=lambda p: (p[0] < 0, p[0])):
        mask = (ranks == number) & (hosts == host)
        part = {key: value[mask] for key, value in table.items()}
        found.append(Cycles(Rank(host, number), part, _chosen(part, setting, failed)))
    return found


def _failed(folder: Path) -> set[tuple[str, int, str]]:
    asked = read_columns(folder, "requests")
    if not asked:
        return set()
    rows = zip(asked["setting"], asked["block"], asked["prompt_id"], asked["error"], strict=True)
    return {(str(s), int(b), str(p)) for s, b, p, error in rows if error}


def _chosen(part: Columns, setting: str | None, failed: set[tuple[str, int, str]]) -> NDArray[np.bool_]:
    """Kept decode cycles of the setting (None: all but the baseline's), probes in, as the analysis takes them."""
    settings = np.asarray(part["setting"], str)
    keep: NDArray[np.bool_] = (np.asarray(part["dropped"], str) == "") & (np.asarray(part["kind"], str) == "decode")
    keep &= np.asarray(part["probed"]) == 1
    keep &= (settings != BASELINE) if setting is None else (settings == setting)
    if failed:
        keys = zip(settings.tolist(), part["block"].tolist(), part["prompt_id"].tolist(), strict=True)
        keep &= np.array([(s, int(b), str(p)) not in failed for s, b, p in keys], bool)
    return keep


def phase_times(folder: Path, cycles: Cycles) -> dict[str, Floats]:
    """Self time of each phase in each chosen cycle, ms (0 where the phase did not run)."""
    spans = read_columns(folder, "spans", ("host", "rank", "cycle", "point", "self_ns", "inside"), cycles.rank)
    if not spans:
        return {}
    count = len(cycles.chosen)
    names, code = np.unique(np.asarray(spans["point"], str), return_inverse=True)
    cycle = np.asarray(spans["cycle"], np.int64)
    keep = (cycle >= 0) & (cycle < count) & np.asarray(spans["inside"], bool)
    of = np.array([PHASES.index(phase_of(name)) if name != "cycle" else -1 for name in names.tolist()], np.int64)
    phase = of[code]
    keep &= phase >= 0
    where = cycle[keep] * len(PHASES) + phase[keep]
    total = np.bincount(where, weights=np.asarray(spans["self_ns"], float)[keep], minlength=count * len(PHASES))
    by_cycle = total.reshape(count, len(PHASES))[cycles.chosen] / 1e6
    return {name: by_cycle[:, i] for i, name in enumerate(PHASES) if by_cycle[:, i].any()}


@dataclass(frozen=True)
class Histogram:
    """Counts over equal bins from ``low`` to ``high`` (ms); ``outside`` values lie beyond them."""

    low: float
    high: float
    counts: NDArray[np.int64]
    outside: int


def histogram(values: Floats, bins: int = 30) -> Histogram:
    """Equal bins between the 0.5th and 99.5th percentile: a few stragglers would squeeze everything else into one."""
    low, high = np.percentile(values, [0.5, 99.5]).tolist()
    if high <= low:
        low, high = low - max(abs(low) * 0.05, 1e-3), low + max(abs(low) * 0.05, 1e-3)
    counts, _ = np.histogram(values, bins=bins, range=(low, high))
    return Histogram(low, high, counts.astype(np.int64), int(len(values) - counts.sum()))


def read_columns(folder: Path, name: str, columns: Sequence[str] | None = None, rank: Rank | None = None) -> Columns:
    """Some columns of a table, of one rank if asked. Raises SpecmeterError for an unreadable table."""
    path = folder / f"{name}.parquet"
    if not path.exists() or (folder / f"{name}.npz").exists():
        whole = read_table(folder, name)
        return _narrowed(whole, columns, rank)
    want = None if rank is None else [("rank", "==", rank.rank), ("host", "==", rank.host)]
    return _read_parquet(path, columns, want)


def read_windows(folder: Path, windows: Sequence[tuple[int, int]], columns: Sequence[str]) -> Columns:
    """The spans of every rank that begin in one of some windows of time, ns."""
    path = folder / "spans.parquet"
    if path.exists() and not (folder / "spans.npz").exists():
        return _read_parquet(path, columns, [[("t0_ns", ">=", a), ("t0_ns", "<", b)] for a, b in windows])
    whole = read_table(folder, "spans")
    if not whole:
        return {}
    keep = np.zeros(len(whole["t0_ns"]), bool)
    for a, b in windows:
        keep |= (whole["t0_ns"] >= a) & (whole["t0_ns"] < b)
    return {key: whole[key][keep] for key in columns}


def _read_parquet(path: Path, columns: Sequence[str] | None, filters: Any) -> Columns:
    try:
        import pyarrow.parquet as parquet

        found = parquet.read_table(path, columns=None if columns is None else list(columns), filters=filters)
        return {key: found[key].to_numpy() for key in found.column_names}
    except ImportError as error:
        raise SpecmeterError(f"{path} needs pyarrow", next_step="pip install -e '.[data]' in the checkout") from error
    except Exception as error:
        raise SpecmeterError(f"The table {path} cannot be read", str(error)) from error


def _narrowed(whole: Columns, columns: Sequence[str] | None, rank: Rank | None) -> Columns:
    if not whole:
        return {}
    names = list(whole) if columns is None else list(columns)
    if rank is None:
        return {key: whole[key] for key in names}
    mask = (whole["rank"] == rank.rank) & (np.asarray(whole["host"], str) == rank.host)
    return {key: whole[key][mask] for key in names}
