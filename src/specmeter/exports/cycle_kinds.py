"""What kind each cycle is for metrics: the trace's kinds, and decode cycles apart by whether anything was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import DECODE, KINDS
from specmeter.trace.plan import PlanIndex, phase_of
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns

PLAIN, UNKNOWN, EMPTY = range(len(KINDS), len(KINDS) + 3)
NAMES = (*KINDS, "plain", "unknown", "empty")
_DRAFTING, _FORWARD = ("draft", "extend"), ("verify",)
_PROBED = 1


@dataclass(frozen=True)
class CycleFacts:
    """What tells a cycle's kind; an entry a cycle in every array, in order of time.

    ``kind`` is the trace's (an index in KINDS); ``drafted``, ``accepted`` (tokens), ``steps`` and ``batch`` are -1
    where they were not read; ``probed`` is 1 where the probes were in. ``drafts`` and ``forward`` say that a point of
    drafting, and one of the target's forward, was hit. ``telling``: the plan has points of both.
    """

    kind: NDArray[np.integer[Any]]
    drafted: NDArray[np.integer[Any]]
    accepted: NDArray[np.integer[Any]]
    steps: NDArray[np.integer[Any]]
    batch: NDArray[np.integer[Any]]
    probed: NDArray[np.integer[Any]]
    drafts: NDArray[np.bool_]
    forward: NDArray[np.bool_]
    telling: bool

    @classmethod
    def of_rank(cls, rank: RankTrace, index: PlanIndex, at: NDArray[np.int64]) -> CycleFacts:
        """Those of the cycles ``at`` of a trace."""
        table = rank.cycles
        columns = [_with_phase(index.names, phases) for phases in (_DRAFTING, _FORWARD)]
        active = (rank.calls[at] > 0) | (rank.outside_ns[at] > 0)
        hit = [np.asarray(active[:, of].any(axis=1), bool) for of in columns]
        return cls(
            table.kind[at], table.drafted[at], table.accepted[at], table.steps[at], table.batch[at], table.probed[at],
            hit[0], hit[1], all(columns),
        )  # fmt: skip

    @classmethod
    def of_run(
        cls, run: Run, cycles: Columns, spans: Columns, of: NDArray[np.bool_], mine: NDArray[np.bool_]
    ) -> CycleFacts:
        """Those of the cycles under ``of``, which ``spans`` under ``mine`` are in, of a saved run's tables."""
        planned = [str(point["name"]) for point in run.plan.get("points", ())]
        numbers = cycles["cycle"][of]
        names, place = np.unique(spans["point"][mine].astype(str), return_inverse=True)
        hit = []
        for phases in (_DRAFTING, _FORWARD):
            wanted = np.isin(np.arange(len(names)), _with_phase(names.tolist(), phases))
            hit.append(np.isin(numbers, spans["cycle"][mine][wanted[place]]))
        kind = np.array([KINDS.index(name) for name in cycles["kind"][of].astype(str)], np.int64)
        return cls(
            kind, cycles["drafted"][of], cycles["accepted"][of], cycles["steps"][of], cycles["batch"][of],
            cycles["probed"][of], hit[0], hit[1], all(_with_phase(planned, p) for p in (_DRAFTING, _FORWARD)),
        )  # fmt: skip


def cycle_kinds(facts: CycleFacts, before: int = UNKNOWN) -> tuple[NDArray[np.int64], int]:
    """Each cycle's kind as an index in NAMES, and what to give as ``before`` for the cycles that follow these.

    A decode cycle without a request is EMPTY (vLLM tells its workers of a request's end with one), and PLAIN where
    nothing was drafted. Not every engine says how many tokens were drafted: then its number of steps, or of accepted
    tokens, says whether any were; else a cycle in which the target ran and no point of drafting was hit is plain. A
    cycle without probes shows none of this and is of the kind of the last decode cycle with them (``before`` that of
    the first ones here). What is not known is UNKNOWN.
    """
    kind: NDArray[np.int64] = facts.kind.astype(np.int64)
    decode = kind == DECODE
    empty = decode & (facts.batch == 0)
    some = facts.drafts | (facts.steps > 0) | (facts.accepted >= 0)
    none = (facts.steps == 0) | (~some & facts.forward & facts.telling)
    told = np.where(none, PLAIN, np.where(some, DECODE, UNKNOWN))
    told = np.where(facts.drafted < 0, told, np.where(facts.drafted > 0, DECODE, PLAIN))
    # Where the cycle's own point reads the number, it is known without the other probes too.
    shown = decode & ~empty & ((facts.probed == _PROBED) | (facts.drafted >= 0))
    kind[shown] = told[shown]
    kind[empty] = EMPTY
    last = np.maximum.accumulate(np.where(shown, np.arange(len(kind)), -1))
    hidden = decode & ~empty & ~shown
    kind[hidden] = np.where(last[hidden] >= 0, kind[last[hidden]], before)
    return kind, int(kind[last[-1]]) if len(kind) and last[-1] >= 0 else before


def kind_counts(kinds: NDArray[np.int64]) -> dict[str, int]:
    """How many cycles are of each kind, by its name; ``kinds`` as ``cycle_kinds`` gives them.

    A cycle is of one kind: the counts' sum is the number of cycles. A kind of which there is none is left out.
    """
    return {NAMES[kind]: int(count) for kind, count in zip(*np.unique(kinds, return_counts=True), strict=True)}


def _with_phase(names: Sequence[str], phases: Sequence[str]) -> list[int]:
    """Where the points of some phases stand among ``names``."""
    return [at for at, name in enumerate(names) if phase_of(name) in phases]
