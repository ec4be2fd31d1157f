"""What a report says about collectives in words, and what tune and explain take from it: one way of saying each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specmeter.analysis.collective_match import Matched
from specmeter.analysis.rank_clock import CALENDAR, COLLECTIVES, UNKNOWN

if TYPE_CHECKING:
    from specmeter.analysis.collectives import PhaseCollectives, RankCollectives

# Below this share of all kernels' time a phase's communication is not worth a sentence.
_WORTH_PERCENT = 0.5


def sentences_on(phases: Sequence[PhaseCollectives], ranks: int) -> tuple[str, ...]:
    """One sentence a phase: share, waiting, who serves it; the longest first."""
    worth = [row for row in phases if row.percent >= _WORTH_PERCENT]
    return tuple(_sentence(row, ranks) for row in sorted(worth, key=lambda row: -row.ms.point))


def _sentence(row: PhaseCollectives, ranks: int) -> str:
    share = f"Communication is {row.percent:.0f} % of {row.phase} ({row.ms.point:.2f} of {row.busy_ms:.2f} ms a cycle)"
    if row.waiting_percent is None:
        split = f"how much of it is waiting takes windows of all ranks, and {ranks} is there"
    else:
        split = f"{row.waiting_percent:.0f} % of it waiting for the last rank"
    late = row.straggler
    if late is not None and late.percent >= 50:
        split += f", which is rank {late.rank} in {late.percent:.0f} %"
    return f"{share}, {split}; {nccl_serves(row.phase, row.by_nccl, row.count)}."


def nccl_serves(phase: str, by_nccl: float, count: float) -> str:
    """``NCCL serves 0 of 61 collectives in verify``."""
    return f"NCCL serves {by_nccl:.3g} of {count:.3g} collectives in {phase}"


def nccl_cannot_help(document: Mapping[str, Any]) -> str | None:
    """Why no variable of NCCL can change a run's cycles, from its analysis; None where one may, or nobody knows."""
    found = document.get("collectives") or {}
    phases = found.get("phases") or []
    if not phases or any(row["by_nccl"] for row in phases):
        return None
    most = max(phases, key=lambda row: row["ms"]["point"])
    others = " and ".join(sorted({row["backend"] for row in found["kinds"]}))
    return f"{nccl_serves(most['phase'], 0, most['count'])}: no variable can help while {others} does"


def draft_collectives_ms(document: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds a cycle in collectives that a run's draft and extend phases wait for, by phase; empty if none."""
    phases = (document.get("collectives") or {}).get("phases") or []
    return {row["phase"]: float(row["exposed_ms"]) for row in phases if row["phase"] in ("draft", "extend")}


@dataclass(frozen=True)
class Communication:
    """What a run's deep window says of collectives, for the cost model: ms a cycle by phase, and who serves them.

    ``draft_ms`` is what draft and extend spend in collectives alone, ``transfer_ms`` what every phase spends in them
    without waiting for a rank, and at most as long as its device does nothing else. ``nccl``: NCCL serves any of them,
    in words ``served``.
    """

    draft_ms: Mapping[str, float]
    transfer_ms: Mapping[str, float]
    waiting_ms: float
    nccl: bool
    served: str


def communication(document: Mapping[str, Any]) -> Communication | None:
    """The communication of an analysis; None where no window saw any."""
    phases = (document.get("collectives") or {}).get("phases") or []
    if not phases:
        return None
    moved = {row["phase"]: min(row["exposed_ms"], row["transfer_ms"] or row["ms"]["point"]) for row in phases}
    waited = sum(row["waiting_ms"]["point"] for row in phases if row["waiting_ms"])
    told = nccl_cannot_help(document)
    most = max(phases, key=lambda row: row["ms"]["point"])
    served = told or nccl_serves(most["phase"], most["by_nccl"], most["count"])
    return Communication(draft_collectives_ms(document), moved, waited, told is None, served)


def notes_on(found: Matched, joined: Sequence[RankCollectives], ranks: Sequence[int]) -> tuple[str, ...]:
    """What was left out and how sure the rest is, a sentence each."""
    return tuple(_notes(found, joined, ranks))


def _notes(found: Matched, joined: Sequence[RankCollectives], ranks: Sequence[int]) -> Iterator[str]:
    seen = {window.rank for window in found.windows} | {window.rank for window, _reason in found.unmatched}
    for rank in sorted(set(ranks) - seen):
        yield f"rank {rank} has no window: waiting for it is counted as transfer"
    for window, reason in found.unmatched:
        yield f"the window of rank {window.rank} on {window.host} was left out: {reason}"
    if len(found.apart):
        total = len(found.apart) + len(found.cycles)
        yield f"{len(found.apart)} of {total} cycles were left out: the ranks ran different collectives in them"
    if found.split:
        yield f"{found.split} collectives ran by another backend on some rank; the first rank's is shown"
    yield from _clock_notes(joined)
    said: dict[str, list[int]] = {}
    for window in found.windows:
        for note in window.notes:
            said.setdefault(note, []).append(window.rank)
    for note, of in said.items():
        yield note if len(of) == len(found.windows) else f"rank {', '.join(map(str, of))}: {note}"


def _clock_notes(joined: Sequence[RankCollectives]) -> Iterator[str]:
    said = set()
    for row in joined:
        clock = row.clock
        if clock.note and clock.note not in said:
            said.add(clock.note)
            yield clock.note
        elif clock.source in (COLLECTIVES, CALENDAR, UNKNOWN) and clock.host not in said:
            said.add(clock.host)
            bound = (
                f"off by at most {clock.error_ns / 1e3:.1f} us" if clock.error_ns is not None else "of unknown error"
            )
            yield f"the clock of {clock.host} is on that of {joined[0].host}, by {clock.source}, {bound}"
