"""What the cost model is fitted to: a run's cycles by setting, each named point by itself, summed over prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.costmodel_collectives import by_issuer
from specmeter.analysis.stalls import stalled
from specmeter.errors import SpecmeterError
from specmeter.trace.cycles import DROPS, LOST
from specmeter.trace.deep import window_begins
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns

Floats = NDArray[np.float64]
REST = "unattributed"
PLAIN = "baseline"
UNDER_PROFILER = "under a profiler, or after it"
# Fewer cycles of a setting say nothing about its cost.
MIN_CYCLES = 10
# Places in the draft's own order that are told apart: a tree's branches, of which nobody drafts more.
RANKS = 16
_EARLY_SHARE = 0.05
_TREE = re.compile(r"top-k=(\d+)")


@dataclass(frozen=True)
class Sample:
    """The decode cycles of one setting at one batch size.

    ``steps`` is the draft steps (0: no speculation), ``topk`` 1 for a chain, ``width`` the tokens verified a sequence
    (root included), ``batch`` the sequences. The arrays have one row a unit (a prompt): ``count`` cycles [units],
    ``cycle_ms`` their sum [units], ``once_ms`` [units, names] self time of points outside the loop of draft steps,
    ``loop_ms`` [units, names] inside it; ``tokens``, ``tokens_sq`` [units] and ``tokens_once`` [units, names] are sums
    of the tokens gained a sequence, their squares, and their products with ``once_ms``. ``kept`` [units, steps + 1]
    counts verified sequences that kept at least 0, 1, 2, ... drafts. ``stalled`` cycles (analysis.stalls) are
    in none of the times, but in ``kept``. ``missed`` [units, steps, RANKS] counts sequences that failed at draft
    1, 2, ... of a chain by the draft's own place r of the token that the target had there, at [..., r - 1]; the first
    entry counts all of which a place is told, beyond RANKS and outside of the draft's vocabulary too.
    """

    setting: str
    steps: int
    topk: int
    width: float
    batch: float
    units: tuple[str, ...]
    names: tuple[str, ...]
    count: Floats
    cycle_ms: Floats
    once_ms: Floats
    loop_ms: Floats
    tokens: Floats
    tokens_sq: Floats
    tokens_once: Floats
    kept: Floats
    stalled: int = 0
    missed: Floats = field(default_factory=lambda: np.zeros((0, 0, RANKS)))

    @property
    def cycles(self) -> int:
        """How many cycles there are."""
        return int(self.count.sum())

    @property
    def accepts(self) -> bool:
        """Whether accepted counts were recorded."""
        return bool(self.kept[:, 0].sum() > 0)


def samples_of(runs: Sequence[Run], plain: Run | None = None) -> tuple[Sample, ...]:
    """The samples of one or more run directories. Raises SpecmeterError where they hold no decode cycle that counts.

    A run without tables of its own (a sweep over server starts) is read through its children; a baseline that was
    measured in a start of its own is read with it. Of ``plain`` only plain decoding is read.
    """
    parts = [part for run in runs for part in _tables(run)]
    parts += list(_plain_tables(plain)) if parts and plain is not None else []
    if not parts:
        named = ", ".join(str(run.path) for run in runs)
        raise SpecmeterError(
            f"There are no recorded cycles in {named}.",
            "The cost model is fitted to the cycles and spans of a profile, sweep or demo.",
            "Record one: specmeter profile --out DIR (bench runs without probes and holds none).",
        )
    names = tuple(sorted({str(p) for _, spans in parts for p in np.unique(spans["point"].astype(str))} | {REST}))
    found: dict[tuple[str, int], list[Sample]] = {}
    for cycles, spans in parts:
        for sample in _samples(cycles, spans, names):
            found.setdefault((sample.setting, round(sample.batch)), []).append(sample)
    merged = tuple(_merged(group) for group in found.values())
    kept = tuple(s for s in merged if s.cycles >= MIN_CYCLES)
    if not kept:
        raise SpecmeterError(
            "Too few decode cycles to fit anything.",
            f"No setting has {MIN_CYCLES} that count; the first and the last of a request do not.",
            "Record longer: more --requests or --max-tokens.",
        )
    return kept


def _tables(run: Run) -> Iterator[tuple[Columns, Columns]]:
    cycles = run.cycles and _unslowed(run, run.cycles)
    spans = run.spans if cycles else {}
    children = run.children
    if cycles and spans and len(cycles["t0_ns"]) and len(spans["cycle"]):
        yield cycles, by_issuer(spans)
        children = {name: child for name, child in children.items() if name == "baseline"}
    for child in children.values():
        yield from _tables(child)


def _unslowed(run: Run, cycles: Columns) -> Columns:
    """The cycles, those that ran under a deep window's profiler or after it, where it stays in part, marked as dropped.

    A setting keeps them where fewer than MIN_CYCLES that count came before.
    """
    late = np.zeros(len(cycles["t0_ns"]), bool)
    for host, rank, begin_ns in window_begins(run.path):
        late |= (cycles["host"] == host) & (cycles["rank"] == rank) & (cycles["t0_ns"] >= begin_ns)
    timed = cycles["dropped"] == ""
    for setting in np.unique(cycles["setting"][late]):
        of = cycles["setting"] == setting
        if int(np.count_nonzero(of & timed & ~late)) < MIN_CYCLES:
            late &= ~of
    return {**cycles, "dropped": np.where(late & timed, UNDER_PROFILER, cycles["dropped"])} if late.any() else cycles


def _plain_tables(run: Run) -> Iterator[tuple[Columns, Columns]]:
    for cycles, spans in _tables(run):
        plain = cycles["setting"] == PLAIN
        if plain.any():
            yield {key: column[plain] for key, column in cycles.items()}, spans


def has_plain(run: Run) -> bool:
    """Whether a run, or its baseline's own start, holds cycles of plain decoding."""
    return next(_plain_tables(run), None) is not None


def _samples(cycles: Columns, spans: Columns, names: tuple[str, ...]) -> Iterator[Sample]:
    lead = _leading(cycles["rank"])
    cycles = {key: column[cycles["rank"] == lead] for key, column in cycles.items()}
    mine = (spans["rank"] == lead) & spans["inside"].astype(bool) & (spans["cycle"] >= 0)
    once, loop = _self_times(cycles, {key: column[mine] for key, column in spans.items()}, names)
    decode = (cycles["kind"] == "decode") & (cycles["probed"] == 1)
    timed = decode & (cycles["dropped"] == "")
    whole = decode & (cycles["dropped"] != DROPS[LOST])  # one with records missing may hold two cycles' counts
    # A server switched to no drafts still runs the draft's forward: neither a chain nor plain decoding.
    for setting in sorted(set(cycles["setting"][timed].tolist()) - {"k=0"}):
        for batch in np.unique(cycles["batch"][timed & (cycles["setting"] == setting)]):
            of = (cycles["setting"] == setting) & (cycles["batch"] == batch)
            _refuse_early_ends(str(setting), cycles, timed & of)
            yield _sample(str(setting), cycles, once, loop, names, timed & of, whole & of)


def _refuse_early_ends(setting: str, cycles: Columns, use: NDArray[np.bool_]) -> None:
    """Where a draft may end before its last step, acceptance by position says nothing about a smaller step count."""
    drafted = cycles["drafted"]
    early = use & (drafted > 0) & (drafted < drafted[use].max(initial=0))
    if early.sum() > _EARLY_SHARE * max(int(use.sum()), 1):
        raise SpecmeterError(
            f"The drafts of {setting} end early in {int(early.sum())} of {int(use.sum())} cycles.",
            "The model takes every chain to be drafted to its last step, and predicts shorter ones from that.",
            "Record with every step drafted (the embedded engine: --speculative-draft-p-min 0).",
        )


def _leading(ranks: NDArray[np.int32]) -> int:
    known = ranks[ranks >= 0]
    return int(known.min()) if len(known) else int(ranks.min())


def _self_times(cycles: Columns, spans: Columns, names: tuple[str, ...]) -> tuple[Floats, Floats]:
    """Self time in ms of every point, [cycles, names]: outside and inside the loop; the rest under ``unattributed``."""
    place = {int(number): row for row, number in enumerate(cycles["cycle"])}
    row = np.array([place.get(int(c), -1) for c in spans["cycle"]], np.int64)
    column = np.searchsorted(np.array(names), spans["point"].astype(str))
    shape = (len(cycles["cycle"]), len(names))
    tables: list[Floats] = []
    for inside in (spans["step"] < 2, spans["step"] >= 2):
        use = inside & (row >= 0)
        cell = row[use] * shape[1] + column[use]
        flat = np.bincount(cell, weights=spans["self_ns"][use] / 1e6, minlength=shape[0] * shape[1])
        tables.append(np.asarray(flat, float).reshape(shape))
    once, loop = tables
    once[:, names.index(REST)] = cycles["dur_ns"] / 1e6 - once.sum(axis=1) - loop.sum(axis=1)
    return once, loop


def _sample(
    setting: str,
    cycles: Columns,
    once: Floats,
    loop: Floats,
    names: tuple[str, ...],
    timed: NDArray[np.bool_],
    verified: NDArray[np.bool_],
) -> Sample:
    stalls = stalled(cycles["dur_ns"], timed)
    at = np.flatnonzero(timed & ~stalls)
    names_of = _units(cycles)
    units = np.unique(names_of[timed | verified])
    unit = np.searchsorted(units, names_of)
    batch = max(1.0, float(cycles["batch"][at].mean()))
    steps = _steps(setting, cycles["steps"][at])
    drafted = cycles["drafted"][at]
    width = float(drafted[drafted >= 0].mean() / batch) + 1 if bool((drafted >= 0).any()) else steps + 1.0
    tree = _TREE.search(setting)

    def total(weights: Floats | None) -> Floats:
        return np.asarray(np.bincount(unit[at], weights=weights, minlength=len(units)), float)

    gained = np.maximum(cycles["accepted"][at], 0) / batch + 1
    return Sample(
        setting, steps, int(tree.group(1)) if tree else 1, width, batch, tuple(units.tolist()), names,
        total(None), total(cycles["dur_ns"][at] / 1e6),
        np.stack([total(column) for column in once[at].T], axis=1),
        np.stack([total(column) for column in loop[at].T], axis=1),
        total(gained), total(gained**2),
        np.stack([total(column * gained) for column in once[at].T], axis=1),
        _kept(cycles, verified, unit, len(units), steps), int(stalls.sum()),
        _missed(cycles, verified, unit, len(units), steps),
    )  # fmt: skip


def _units(cycles: Columns) -> NDArray[np.str_]:
    """What was drawn independently: the prompt, or 50 cycles where requests are not known."""
    prompts = cycles["prompt_id"].astype(str)
    blocks = np.char.add("cycles ", (np.arange(len(prompts)) // 50).astype(str))
    return np.asarray(np.where(prompts == "", blocks, prompts), dtype=np.str_)


def _steps(setting: str, steps: NDArray[np.int32]) -> int:
    known = steps[steps >= 0]
    if setting == PLAIN:
        return 0
    if not len(known):
        raise SpecmeterError(
            f"The step count of the setting {setting or 'recorded'} is not known.",
            "Neither steps nor drafted tokens were read from this engine's cycles.",
            "Profile with a recipe whose cycle point has the values steps or drafted.",
        )
    return int(np.bincount(known).argmax())


def _kept(cycles: Columns, verified: NDArray[np.bool_], unit: NDArray[np.int64], units: int, steps: int) -> Floats:
    """Sequences that kept at least j drafts, [units, steps + 1].

    The first and last cycles of a request count: they are dropped for their times, and without them accept lengths
    would be of another text than the tokens that were sent. With a batch above 1 the table has sums only: none here.
    """
    kept = np.zeros((units, steps + 1))
    at = np.flatnonzero(verified & (cycles["accepted"] >= 0) & (cycles["batch"] <= 1))
    for j in range(steps + 1 if steps else 0):
        kept[:, j] = np.bincount(unit[at], weights=cycles["accepted"][at] >= j, minlength=units)
    return kept


def _missed(cycles: Columns, verified: NDArray[np.bool_], unit: NDArray[np.int64], units: int, steps: int) -> Floats:
    """Failures by place, [units, steps, RANKS]; zeros where the engine does not tell the places."""
    found = np.zeros((units, steps, RANKS))
    ranks = cycles.get("missed_rank")
    if ranks is None or ranks.dtype.kind not in "iu":
        return found
    accepted = cycles["accepted"]
    told = verified & (ranks >= 0) & (cycles["batch"] <= 1) & (accepted >= 0) & (accepted < steps)
    place = np.where((ranks >= 2) & (ranks <= RANKS), ranks - 1, 0)
    # Each failure under "all of which a place is told", and those near enough under their own place too.
    for chosen, column in ((told, np.zeros_like(place)), (told & (place > 0), place)):
        cell = (unit[chosen] * steps + accepted[chosen]) * RANKS + column[chosen]
        found += np.bincount(cell, minlength=found.size).reshape(found.shape)
    return found


def _merged(group: Sequence[Sample]) -> Sample:
    """Several recordings of one setting as one, units of the same name joined."""
    if len(group) == 1:
        return group[0]
    first = group[0]
    units = tuple(sorted({unit for sample in group for unit in sample.units}))
    place = {unit: row for row, unit in enumerate(units)}

    def joined(name: str) -> Floats:
        arrays = [getattr(sample, name) for sample in group]
        out = np.zeros((len(units), *arrays[0].shape[1:]))
        for sample, array in zip(group, arrays, strict=True):
            np.add.at(out, [place[unit] for unit in sample.units], array)
        return out

    return replace(
        first, units=units, count=joined("count"), cycle_ms=joined("cycle_ms"), once_ms=joined("once_ms"),
        loop_ms=joined("loop_ms"), tokens=joined("tokens"), tokens_sq=joined("tokens_sq"),
        tokens_once=joined("tokens_once"), kept=joined("kept"), stalled=sum(sample.stalled for sample in group),
        missed=joined("missed"),
    )  # fmt: skip
