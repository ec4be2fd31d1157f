"""Saved runs, from their tables: which cycles the report is over, and each one's time by phase."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.stalls import without_stalls
from specmeter.errors import SpecmeterError
from specmeter.trace.plan import PHASES, phase_of
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns


def profile_tables(run: Run) -> tuple[Columns, Columns]:
    """The cycles and spans of a saved profile. Raises SpecmeterError when it has no profile, or lacks the tables."""
    if run.analysis.get("kind") != "profile":
        kind = run.analysis.get("kind")
        raise SpecmeterError(
            f"{run.path} holds no profile",
            f"Its analysis is of kind {kind!r}." if kind else "It was cut off before its analysis.",
            "Name a directory of `specmeter profile`; other runs may have some in their children/.",
        )
    cycles, spans = run.cycles, run.spans
    if not cycles or not spans or not len(cycles["cycle"]):
        raise SpecmeterError(f"{run.path} holds no cycles", "It was cut off, or its tables were taken out.")
    for name, table in (("cycles", cycles), ("spans", spans)):
        if len({len(column) for column in table.values()}) != 1:
            raise SpecmeterError(f"The table {name} of {run.path} is damaged", "Its columns differ in length.")
    return cycles, spans


def analysed(run: Run, cycles: Columns) -> NDArray[np.bool_]:
    """The rows of ``cycles`` that the run's report is over, on every rank; ``timed`` are those its times are from."""
    return counted(cycles, run.requests, run.analysis.get("setting"))


def counted(cycles: Columns, requests: Columns, setting: str | None) -> NDArray[np.bool_]:
    """The kept decode cycles with probes in, of a setting's finished ``requests`` (None: of all but the baseline's).

    As ``analysis.profile`` chooses them from a trace; without requests the setting is not known, and all count.
    """
    chosen: NDArray[np.bool_] = (cycles["dropped"] == "") & (cycles["kind"] == "decode") & (cycles["probed"] == 1)
    if not requests:
        return chosen
    chosen &= (cycles["setting"] != "baseline") if setting is None else (cycles["setting"] == setting)
    failed = np.flatnonzero(requests["error"] != "")
    if len(failed):
        names = ("setting", "block", "prompt_id")
        wrong = set(zip(*(requests[name][failed].tolist() for name in names), strict=True))
        keys = zip(*(cycles[name].tolist() for name in names), strict=True)
        chosen &= np.array([key not in wrong for key in keys], bool)
    return chosen


def timed(run: Run, cycles: Columns) -> NDArray[np.bool_]:
    """The rows of ``cycles`` that the run's report takes times from, on every rank: without each rank's stalls."""
    return timed_of(cycles, analysed(run, cycles))


def timed_of(cycles: Columns, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """``chosen`` without the stalls of each rank."""
    found = np.zeros(len(chosen), bool)
    for host, rank in set(zip(cycles["host"].tolist(), cycles["rank"].tolist(), strict=True)):
        mine = chosen & (cycles["host"] == host) & (cycles["rank"] == rank)
        found |= without_stalls(cycles["dur_ns"], mine)
    return found


def phase_times(
    run: Run, spans: Columns, of: NDArray[np.bool_], row: NDArray[np.int64]
) -> Mapping[str, NDArray[np.float64]]:
    """Seconds of own time of each phase's leaf points, summed by row.

    ``of`` selects spans (one rank's), and ``row`` says for each cycle number where its time goes, -1 nowhere. Of
    ``spans`` the columns ``inside clock cycle point self_ns`` are read.
    """
    leaf = {str(p["name"]) for p in run.plan.get("points", []) if p.get("role") in ("leaf", "wait")}
    at = np.flatnonzero(of & spans["inside"] & (spans["clock"] == "host") & (spans["cycle"] >= 0))
    at = at[spans["cycle"][at] < len(row)]
    at = at[row[spans["cycle"][at]] >= 0]
    names, point = np.unique(spans["point"][at].astype(str), return_inverse=True)
    phase = np.array([PHASES.index(phase_of(n)) if n in leaf else -1 for n in names] or [-1])[point]
    count = int(row.max(initial=-1)) + 1
    found: dict[str, NDArray[np.float64]] = {}
    for number, name in enumerate(PHASES):
        mine = at[phase == number]
        if len(mine):
            weights = spans["self_ns"][mine].astype(float) / 1e9
            found[name] = np.asarray(np.bincount(row[spans["cycle"][mine]], weights=weights, minlength=count), float)
    return found
