"""One rank's figures while its server runs: sums by second for the last minute, and totals since the look began."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.acceptance import sequences_of
from specmeter.exports.cycle_kinds import PLAIN, UNKNOWN, CycleFacts, cycle_kinds, kind_counts
from specmeter.exports.figures import Buckets, Figures, Position
from specmeter.live.recent import AT, DRAFTED0, KEPT0, MOST_POSITIONS, PHASE0, WIDTH, Recent, recent_of, tokens_each
from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import DECODE
from specmeter.trace.plan import LEAF, PHASES, WAIT, PlanIndex, phase_of

SECONDS = 64
_MOST_GAPS = 256


@dataclass(frozen=True)
class Taken:
    """Cycles that were counted, in order of time; one entry each.

    ``t0_ns`` is the begin, ``number`` counts them since the look began, ``idles`` says after how many of those before
    the engine had waited for work. ``second`` (of perf_counter) is where a speculative cycle with probes counts; -1:
    it is none.
    """

    t0_ns: NDArray[np.int64]
    number: NDArray[np.int64]
    idles: NDArray[np.int64]
    second: NDArray[np.int64]


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
        self._sums = np.zeros((SECONDS, WIDTH))
        self._second = -1
        self._gaps: deque[int] = deque(maxlen=_MOST_GAPS)
        self._durs: deque[int] = deque(maxlen=_MOST_GAPS)
        self._skip_first = True
        self._total = np.zeros(WIDTH)
        self._kinds = {"decode": 0}
        self._before = UNKNOWN
        self._number, self._idles = 0, 0
        self._histograms = histograms
        self._cycle, self._phases, self._seam = Buckets(), dict[str, Buckets](), Buckets()
        self.device = False

    def interrupt(self) -> None:
        """Records were lost, or the probes went in or out: the next cycle is not whole."""
        self._skip_first = True

    def take(self, rank: RankTrace, until_ns: int) -> Taken | None:
        """Add the cycles that began before ``until_ns``, and say which; later ones come again, whole."""
        table = rank.cycles
        count = int(np.searchsorted(table.t0_ns, until_ns, side="left"))
        first = 1 if self._skip_first and count else 0
        if count:
            self._skip_first = False
        at = np.arange(first, min(count, len(table) - 1))
        if not len(at):
            return None
        idle = self._idle(table.dur_ns[at], table.own_ns[at])
        facts = CycleFacts.of_rank(rank, self._index, at)
        kinds, self._before = cycle_kinds(facts, self._before)
        for name, number in kind_counts(kinds).items():
            self._kinds[name] = self._kinds.get(name, 0) + number
        drafts = ~idle & ((kinds == DECODE) | (kinds == UNKNOWN))
        told = (kinds == DECODE) | (not facts.telling)
        speculative, clean = at[drafts & (facts.probed == 1)], at[drafts & told & (facts.probed == 0)]
        plain = at[~idle & (kinds == PLAIN)]
        second = ((table.t0_ns + table.dur_ns) // 1_000_000_000).astype(np.int64)
        self.advance(int(second[at[-1]]))
        self._tokens(rank, at, second, kinds, idle)
        self._add(second[plain], "plain", np.ones(len(plain)))
        self._add(second[plain], "plain_ns", table.dur_ns[plain])
        self._add(second[clean], "clean", np.ones(len(clean)))
        self._add(second[clean], "clean_ns", table.dur_ns[clean])
        self._speculative(rank, speculative, second)
        self._accepted(rank, at, second)
        return self._taken(rank, at, idle, np.where(np.isin(at, speculative), second[at], -1))

    def take_device(self, second: NDArray[np.int64], gaps_ns: NDArray[np.int64]) -> None:
        """Add the device's gaps between timed points, ns, one entry a cycle; each counts for its ``second``."""
        self.device = True
        self._add(second, "seam_ns", gaps_ns)
        self._add(second, "seam_cycles", np.ones(len(second)))
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
        plain = self._sums[minute][:, [AT["plain_ns"], AT["plain"]]].sum(axis=0)
        # A rate over seconds before the first look would be too low: nothing of them was read.
        watched_s = float(seconds) if self._since_s is None else min(float(seconds), now_second - self._since_s)
        return recent_of(self._sums[rows].sum(axis=0), plain, seconds, watched_s)

    def trend(self, now_second: int, seconds: int = 60) -> list[float]:
        """Tokens in each of the last whole seconds, the oldest first."""
        self.advance(now_second)
        rows = self._sums[[(now_second - seconds + i) % SECONDS for i in range(seconds)]]
        each = tokens_each(rows.sum(axis=0))
        tokens: list[float] = (rows[:, AT["tokens"]] + each * rows[:, AT["hidden"]]).tolist()
        return tokens

    def figures(self, server: str, rank: RankTrace, now_second: int, lost: int, armed: bool) -> Figures:
        """What metrics show of this rank."""
        minute = self.recent(now_second, 60)
        total = self._total
        places = int(np.count_nonzero(total[DRAFTED0:KEPT0]))
        drafted, kept = total[DRAFTED0:KEPT0].astype(int).tolist(), total[KEPT0:].astype(int).tolist()
        reached = [drafted[0], *kept[:-1]]
        return Figures(
            server, rank.host, rank.rank, self._cycle, dict(self._phases), self._seam if self.device else None,
            dict(self._kinds),
            int(total[AT["sequence_tokens"]]), int(total[AT["sequences"]]),
            tuple(Position(drafted[i], reached[i], kept[i]) for i in range(places)),
            minute.accept_length, minute.cycle_ms / 1e3 if minute.cycle_ms else None,
            minute.plain_ms / 1e3 if minute.plain_ms else None, None, lost, armed,
        )  # fmt: skip

    def with_sums_of(self, others: Sequence[RankStats]) -> RankStats:
        """New stats, to be looked at only, whose sums are these and the others'."""
        found = RankStats(self._index, self._histograms, self._since_s)
        found.advance(max(stats._second for stats in (self, *others)))
        for stats in (self, *others):
            stats.advance(found._second)
            found._sums += stats._sums
            found._total += stats._total
            found._cycle, found._seam = found._cycle.plus(stats._cycle), found._seam.plus(stats._seam)
            for phase, buckets in stats._phases.items():
                found._phases[phase] = found._phases.get(phase, Buckets()).plus(buckets)
            for name, number in stats._kinds.items():
                found._kinds[name] = found._kinds.get(name, 0) + number
            found.device = found.device or stats.device
        return found

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

    def _taken(
        self, rank: RankTrace, at: NDArray[np.int64], idle: NDArray[np.bool_], second: NDArray[np.int64]
    ) -> Taken:
        """Which cycles these are among all that were taken."""
        before = self._idles + np.cumsum(idle) - idle
        taken = Taken(rank.cycles.t0_ns[at], self._number + np.arange(len(at)), before, second)
        self._number, self._idles = self._number + len(at), self._idles + int(np.count_nonzero(idle))
        return taken

    def _tokens(
        self,
        rank: RankTrace,
        at: NDArray[np.int64],
        second: NDArray[np.int64],
        kinds: NDArray[np.int64],
        idle: NDArray[np.bool_],
    ) -> None:
        """Tokens by second. A plain step gives each of its sequences one, whether or not the engine's count was read.

        Which cycles are sampled is drawn, so the others are taken to give as many tokens, whatever their kinds.
        """
        table = rank.cycles
        tokens = table.sampled[at].astype(np.int64)
        tokens = np.where((tokens < 0) & (kinds == PLAIN) & (table.batch[at] > 0), table.batch[at], tokens)
        self._add(second[at], "tokens", np.maximum(tokens, 0))
        decode = (kinds == DECODE) | (kinds == PLAIN) | (kinds == UNKNOWN)
        drawn = ~idle & decode & table.drawn[at]
        of, tokens = second[at[drawn]], tokens[drawn]
        self._add(of, "hidden", tokens < 0)
        self._add(of, "seen", tokens >= 0)
        self._add(of, "seen_tokens", np.maximum(tokens, 0))

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
                self._add(of, PHASE0 + number, each)
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
            self._add(of, DRAFTED0 + place, depth > place)
            self._add(of, KEPT0 + place, (depth > place) & (kept > place))

    def _add(self, second: NDArray[np.int64], field: str | int, values: NDArray[np.generic]) -> None:
        if not len(second):
            return
        column = AT[field] if isinstance(field, str) else field
        weights = values.astype(float)
        self._total[column] += weights.sum()
        fresh = second > self._second - SECONDS
        np.add.at(self._sums[:, column], second[fresh] % SECONDS, weights[fresh])
