"""Reports without accept lengths: the range that each line implies, and which lines cannot all be true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specmeter.analysis.costmodel_figures import Line, Series
from specmeter.errors import SpecmeterError


@dataclass(frozen=True)
class Implied:
    """What a line implies: its cycle's range in ms, and the accept length's in tokens (both ends within 1..steps + 1).

    ``together`` is the range that is left when all lines are true and longer chains keep at least as much (None: no
    accept length is). ``possible`` is False if no accept length of that chain gives the reported speed by itself.
    """

    label: str
    steps: int
    tok_s: float
    cycle_ms: tuple[float, float]
    tokens: tuple[float, float]
    possible: bool
    together: tuple[float, float] | None = None


@dataclass(frozen=True)
class Conflict:
    """Lines that cannot all be true at one cycle cost, why, and what would have to hold for them to be true."""

    lines: tuple[str, ...]
    why: str
    would_need: str
    within_range: bool


@dataclass(frozen=True)
class Story:
    """The ranges, the conflicts, and what to measure next, most telling first."""

    implied: tuple[Implied, ...]
    conflicts: tuple[Conflict, ...]
    measure_next: tuple[str, ...]


def check_story(series: Series) -> Story:
    """Accept length = tok/s x cycle for one stream, with the cycle = verify / its share, and so each line's range.

    Two facts hold for any chain: its accept length lies in 1..steps + 1, and a longer one keeps at least as many drafts
    (the first positions are the same). Raises SpecmeterError without the verify range, its share, or a speed.
    """
    if series.verify_ms is None or series.verify_share is None:
        raise SpecmeterError(f"{series.name}: without accept lengths, verify_ms and verify_share are needed.")
    lines = [line for line in series.lines if line.tok_s is not None]
    implied = _together([_implied(line, series) for line in lines])
    conflicts = [*_shorter_keeps_more(lines, series), *_not_the_best(lines, series)]
    return Story(implied, tuple(conflicts), _next(lines, conflicts))


def _cut(line: Line, series: Series) -> float:
    """What a change of verify does to the whole cycle, as a factor."""
    share = series.verify_share or 0.0
    return 1 - share * (1 - line.verify_factor)


def _cycle(line: Line, series: Series) -> tuple[float, float]:
    assert series.verify_ms is not None and series.verify_share is not None
    low, high = series.verify_ms
    return low / series.verify_share * _cut(line, series), high / series.verify_share * _cut(line, series)


def _implied(line: Line, series: Series) -> Implied:
    assert line.tok_s is not None
    low, high = _cycle(line, series)
    tokens = (line.tok_s * low / 1000, line.tok_s * high / 1000)
    most = line.steps + 1.0
    possible = tokens[1] >= 1 and tokens[0] <= most
    kept = (max(1.0, tokens[0]), min(most, tokens[1]))
    return Implied(line.label, line.steps, line.tok_s, (low, high), kept if possible else tokens, possible)


def _together(alone: Sequence[Implied]) -> tuple[Implied, ...]:
    """Each range cut to what a shorter chain's least and a longer chain's most leave of it."""
    out = []
    for one in alone:
        low = max(other.tokens[0] for other in alone if other.steps <= one.steps)
        high = min(other.tokens[1] for other in alone if other.steps >= one.steps)
        out.append(replace(one, together=(low, high) if low <= high else None))
    return tuple(out)


def _shorter_keeps_more(lines: Sequence[Line], series: Series) -> list[Conflict]:
    found = []
    for short in lines:
        for long in (line for line in lines if line.steps > short.steps):
            assert short.tok_s is not None and long.tok_s is not None
            # At one cycle cost before any change, tokens go as tok/s times what the change did to the cycle.
            ratio = (long.tok_s * _cut(long, series)) / (short.tok_s * _cut(short, series))
            if ratio >= 1:
                continue
            need = 1 / ratio
            assert series.verify_ms is not None
            reach = series.verify_ms[1] / series.verify_ms[0]
            found.append(Conflict(
                (short.label, long.label),
                f"at one cycle cost {long.steps} steps would gain {100 * (1 - ratio):.0f} % fewer tokens a cycle than "
                f"{short.steps}, but a longer chain keeps at least as many drafts",
                f"the cycle of {long.steps} steps costs at least {100 * (need - 1):.0f} % more than that of "
                f"{short.steps}, like for like",
                need <= reach,
            ))  # fmt: skip
    return found


def _not_the_best(lines: Sequence[Line], series: Series) -> list[Conflict]:
    """A line said to be best after a change, though the change alone would carry another line past it."""
    found = []
    for best in (line for line in lines if line.best and line.verify_factor != 1):
        for other in (line for line in lines if line is not best and line.verify_factor == 1):
            assert best.tok_s is not None and other.tok_s is not None
            after = other.tok_s * _cut(other, series) ** -1 * _cut(best, series) ** -1
            if after <= best.tok_s:
                continue
            found.append(Conflict(
                (other.label, best.label),
                f"the same change would bring {other.steps} steps from {other.tok_s:g} to {after:.1f} tok/s, past the "
                f"{best.tok_s:g} that is said to be the best",
                f"the change helps verify at {other.steps + 1} tokens less than at {best.steps + 1}: at most "
                f"{100 * (1 - other.tok_s / best.tok_s) / (series.verify_share or 1):.0f} % instead of "
                f"{100 * (1 - best.verify_factor):.0f} %",
                True,
            ))  # fmt: skip
    return found


def _next(lines: Sequence[Line], conflicts: Sequence[Conflict]) -> tuple[str, ...]:
    longest = max(line.steps for line in lines)
    widths = ", ".join(str(k + 1) for k in sorted({line.steps for line in lines}))
    steps = [f"accept length by position at {longest} steps, one run: it gives that of every shorter chain"]
    if conflicts:
        steps.append(
            f"the verify forward at {widths} tokens, each by itself: one range for all hides what the lines need"
        )
    if any(line.verify_factor != 1 for line in lines):
        steps.append("the change of verify at each of these widths, before and after, and on the plain step too")
    steps.append("each line in interleaved repeats: differences of a few per cent between single starts mean nothing")
    return tuple(steps)
