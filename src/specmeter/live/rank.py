"""One rank's figures while its server runs: sums by second for the last minute, and totals since the look began."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.acceptance import sequences_of
from specmeter.exports.figures import Buckets, Figures, Position, kind_counts
from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import DECODE, KINDS
from specmeter.trace.plan import LEAF, PHASES, WAIT, PlanIndex, phase_of

SECONDS = 64
MOST_POSITIONS = 16
_MOST_GAPS = 256
_FIELDS = (
    "cycles",
    "cycle_ns",
    "leaf_ns",
    "tokens",
    "sequences",
    "sequence_tokens",
    "batch",
    "plain",
    "plain_ns",
    "seam_ns",
    "clean",
    "clean_ns",
    "hidden",
    "seen",
    "seen_tokens",
)
_NAMES = np.array(KINDS)
_AT = {name: i for i, name in enumerate(_FIELDS)}
_PHASE0 = len(_FIELDS)
_DRAFTED0 = _PHASE0 + len(PHASES)
_KEPT0 = _DRAFTED0 + MOST_POSITIONS
_WIDTH = _KEPT0 + MOST_POSITIONS


@dataclass(frozen=True)
class Recent:
    """Sums over some seconds.

    ``cycle_ms`` and the phases are means over speculative cycles, ms; ``rest_ms`` is what no leaf point covers. With
    the probes in some cycles only, ``clean`` of the ``cycles`` ran without them: the phases are the others',
    and the tokens of clean cycles whose counts were not read are taken to be as many as in the others.
    ``tokens_per_s`` counts all tokens, plain steps included, over as much of these seconds as was watched. ``kept`` is,
    for each draft position, the share of the sequences that drafted so far; ``plain_ms`` is a step without speculation,
    over the last minute. None: not known.
    """

    seconds: int
    cycles: int
    tokens_per_s: float
    cycle_ms: float | None
    phases_ms: dict[str, float]
    rest_ms: float
    accept_length: float | None
    kept: tuple[float, ...]
    batch: float | None
    plain_ms: float | None
    seam_ms: float | None
    clean: int = 0

    @property
    def split_ms(self) -> float:
        """The mean cycle that the phases are parts of, ms."""
        return sum(self.phases_ms.values()) + max(self.rest_ms, 0.0)


class RankStats:
    """Takes cycles as they come; ``histograms`` keeps what metrics need besides.

    ``since_s``: the moment of perf_counter from which records are read; None: from before all that is asked for.
    """

    def __init__(self, index: PlanIndex, histograms: bool = False, since_s: float | None = None) -> None:
        self._index = index
        self._since_s = since_s
        leaves = index.with_role(LEAF, WAIT)
        self._leaves = {
            phase: [i for i in leaves if phase_of(index.names[i]) == phase] for phase in PHASES
        }  # fmt: skip
        self._sums = np.zeros((SECONDS, _WIDTH))
        self._second = -1
        self._gaps: deque[int] = deque(maxlen=_MOST_GAPS)
        self._durs: deque[int] = deque(maxlen=_MOST_GAPS)
        self._skip_first = True
        self._total = np.zeros(_WIDTH)
        self._kinds = {"decode": 0}
        self._histograms = histograms
        self._cycle, self._phases, self._seam = Buckets(), dict[str, Buckets](), Buckets()
        self.device = False

    def interrupt(self) -> None:
        """Records were lost, or the probes went in or out: the next cycle is not whole."""
        self._skip_first = True

    def take(self, rank: RankTrace, until_ns: int) -> None:
        """Add the cycles that began before ``until_ns``; later ones come again, whole."""
        table = rank.cycles
        count = int(np.searchsorted(table.t0_ns, until_ns, side="left"))
        first = 1 if self._skip_first and count else 0
        if count:
            self._skip_first = False
        at = np.arange(first, min(count, len(table) - 1))
        if not len(at):
            return
        busy = at[~self._idle(table.dur_ns[at], table.own_ns[at])]
        decode = busy[table.kind[busy] == DECODE]
        speculative = decode[(table.drafted[decode] != 0) & (table.probed[decode] == 1)]
        clean = decode[(table.drafted[decode] != 0) & (table.probed[decode] == 0)]
        plain = decode[table.drafted[decode] == 0]
        for name, number in kind_counts(_NAMES[table.kind[at]], table.drafted[at]).items():
            self._kinds[name] = self._kinds.get(name, 0) + number
        second = ((table.t0_ns + table.dur_ns) // 1_000_000_000).astype(np.int64)
        self.advance(int(second[at[-1]]))
        self._add(second[at], "tokens", np.maximum(table.sampled[at], 0))
        self._add(second[plain], "plain", np.ones(len(plain)))
        self._add(second[plain], "plain_ns", table.dur_ns[plain])
        self._add(second[clean], "clean", np.ones(len(clean)))
        self._add(second[clean], "clean_ns", table.dur_ns[clean])
        drawn = decode[(table.drafted[decode] != 0) & table.drawn[decode]]
        self._add(second[drawn], "hidden", table.sampled[drawn] < 0)
        self._add(second[drawn], "seen", table.sampled[drawn] >= 0)
        self._add(second[drawn], "seen_tokens", np.maximum(table.sampled[drawn], 0))
        self._speculative(rank, speculative, second)
        self._accepted(rank, at, second)

    def take_device(self, gaps_ns: NDArray[np.int64]) -> None:
        """Add the device's gaps between timed points, ns, one entry a cycle; they count for the present second."""
        self.device = True
        row = self._second % SECONDS
        self._sums[row, _AT["seam_ns"]] += float(gaps_ns.sum())
        self._total[_AT["seam_ns"]] += float(gaps_ns.sum())
        if self._histograms:
            self._seam = self._seam.with_values(gaps_ns / 1e9)

    def advance(self, second: int) -> None:
        """Make ``second`` (of perf_counter) the present one; rows of seconds long past are cleared."""
        if self._second < 0:
            self._second = second
        for passed in range(self._second + 1, min(second, self._second + SECONDS) + 1):
            self._sums[passed % SECONDS] = 0
        self._second = max(self._second, second)

    def recent(self, now_second: int, seconds: int = 10) -> Recent:
        """Sums over the last ``seconds`` whole seconds before ``now_second``."""
        seconds = min(seconds, SECONDS - 4)
        self.advance(now_second)
        rows = [(now_second - 1 - i) % SECONDS for i in range(seconds)]
        # The plain step changes slowly and its requests may be rare: the last minute's counts.
        minute = [(now_second - 1 - i) % SECONDS for i in range(SECONDS - 4)]
        plain = self._sums[minute][:, [_AT["plain_ns"], _AT["plain"]]].sum(axis=0)
        # A rate over seconds before the first look would be too low: nothing of them was read.
        watched_s = float(seconds) if self._since_s is None else min(float(seconds), now_second - self._since_s)
        return _recent(self._sums[rows].sum(axis=0), plain, seconds, watched_s, self.device)

    def trend(self, now_second: int, seconds: int = 60) -> list[float]:
        """Tokens in each of the last whole seconds, the oldest first."""
        self.advance(now_second)
        rows = self._sums[[(now_second - seconds + i) % SECONDS for i in range(seconds)]]
        each = _tokens_each(rows.sum(axis=0))
        tokens: list[float] = (rows[:, _AT["tokens"]] + each * rows[:, _AT["hidden"]]).tolist()
        return tokens

    def figures(self, server: str, rank: RankTrace, now_second: int, lost: int, armed: bool) -> Figures:
        """What metrics show of this rank."""
        minute = self.recent(now_second, 60)
        total = self._total
        places = int(np.count_nonzero(total[_DRAFTED0:_KEPT0]))
        drafted, kept = total[_DRAFTED0:_KEPT0].astype(int).tolist(), total[_KEPT0:].astype(int).tolist()
        reached = [drafted[0], *kept[:-1]]
        return Figures(
            server, rank.host, rank.rank, self._cycle, dict(self._phases), self._seam if self.device else None,
            dict(self._kinds),
            int(total[_AT["sequence_tokens"]]), int(total[_AT["sequences"]]),
            tuple(Position(drafted[i], reached[i], kept[i]) for i in range(places)),
            minute.accept_length, minute.cycle_ms / 1e3 if minute.cycle_ms else None,
            minute.plain_ms / 1e3 if minute.plain_ms else None, None, lost, armed,
        )  # fmt: skip

    def _idle(self, dur: NDArray[np.int64], own: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Cycles after which the engine waited for work, as the trace says it, by the last few hundred cycles."""
        gap = dur - own
        self._gaps.extend(gap.tolist())
        self._durs.extend(dur.tolist())
        limit = 1e9
        if len(self._gaps) > 2:
            limit = max(20.0 * float(np.median(self._gaps)), float(np.median(self._durs)))
        idle: NDArray[np.bool_] = gap > limit
        return idle

    def _speculative(self, rank: RankTrace, at: NDArray[np.int64], second: NDArray[np.int64]) -> None:
        if not len(at):
            return
        of, dur = second[at], rank.cycles.dur_ns[at]
        self._add(of, "cycles", np.ones(len(at)))
        self._add(of, "cycle_ns", dur)
        self._add(of, "batch", np.maximum(rank.cycles.batch[at], 0))
        if self._histograms:
            self._cycle = self._cycle.with_values(dur / 1e9)
        own = rank.self_ns[at]
        for number, phase in enumerate(PHASES):
            columns = self._leaves[phase]
            if columns:
                each = own[:, columns].sum(axis=1)
                self._add(of, _PHASE0 + number, each)
                self._add(of, "leaf_ns", each)
                if self._histograms and (each.any() or phase in self._phases):
                    self._phases[phase] = self._phases.get(phase, Buckets()).with_values(each / 1e9)

    def _accepted(self, rank: RankTrace, at: NDArray[np.int64], second: NDArray[np.int64]) -> None:
        rows, count = rank.cycles.accept, sequences_of(rank.cycles)
        mine = (rows[:, 0] >= at[0]) & (rows[:, 0] <= at[-1])
        mine[mine] = rank.cycles.drafted[rows[mine, 0]] != 0
        rows, count = rows[mine], count[mine]
        if not len(rows):
            return
        of, kept = second[rows[:, 0]], rows[:, 1]
        self._add(of, "sequences", count)
        self._add(of, "sequence_tokens", kept + count)
        rows, of, kept = rows[count == 1], of[count == 1], kept[count == 1]
        if not len(rows):
            return
        # As in analysis.acceptance: a path is no longer than the steps, nor than what was drafted.
        steps = rank.cycles.steps[rows[:, 0]]
        depth = np.where(steps > 0, np.where(rows[:, 2] >= 0, np.minimum(steps, rows[:, 2]), steps), rows[:, 2])
        depth = np.where(depth < 0, int(kept.max()), depth)
        for place in range(min(int(depth.max()), MOST_POSITIONS)):
            self._add(of, _DRAFTED0 + place, depth > place)
            self._add(of, _KEPT0 + place, (depth > place) & (kept > place))

    def _add(self, second: NDArray[np.int64], field: str | int, values: NDArray[np.generic]) -> None:
        if not len(second):
            return
        column = _AT[field] if isinstance(field, str) else field
        weights = values.astype(float)
        self._total[column] += weights.sum()
        fresh = second > self._second - SECONDS
        np.add.at(self._sums[:, column], second[fresh] % SECONDS, weights[fresh])


def _tokens_each(sums: NDArray[np.float64]) -> float:
    """Tokens a cycle where they were read; a cycle without its probes is taken to give as many."""
    seen = float(sums[_AT["seen"]])
    return float(sums[_AT["seen_tokens"]]) / seen if seen else 0.0


def _recent(
    sums: NDArray[np.float64], plain: NDArray[np.float64], seconds: int, watched_s: float, device: bool
) -> Recent:
    value = {name: float(sums[i]) for name, i in _AT.items()}
    cycles = value["cycles"]
    each = 1e6 * cycles
    drafted, kept = sums[_DRAFTED0:_KEPT0], sums[_KEPT0:]
    every = cycles + value["clean"]
    tokens = value["tokens"] + value["hidden"] * _tokens_each(sums)
    return Recent(
        seconds, int(every), tokens / (watched_s if watched_s > 0 else seconds),
        (value["cycle_ns"] + value["clean_ns"]) / every / 1e6 if every else None,
        {p: float(sums[_PHASE0 + i]) / each for i, p in enumerate(PHASES) if cycles and sums[_PHASE0 + i]},
        (value["cycle_ns"] - value["leaf_ns"]) / each if cycles else 0.0,
        value["sequence_tokens"] / value["sequences"] if value["sequences"] else None,
        tuple(float(k / d) for k, d in zip(kept, drafted, strict=True) if d),
        value["batch"] / cycles if cycles and value["batch"] else None,
        float(plain[0] / plain[1]) / 1e6 if plain[1] else None,
        value["seam_ns"] / each if device and cycles else None, int(value["clean"]),
    )  # fmt: skip
