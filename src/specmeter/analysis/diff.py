"""Two saved runs side by side: what was set differently, and each phase's difference with an interval.

A time is a mean over cycles, the unit of its interval the prompt, paired where both runs used the same prompts (then
over those alone). That interval holds for these two server starts. Equal starts differ by several per cent, so a claim
about the setting needs starts as units, three a side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter import __version__
from specmeter.analysis.changes import changes
from specmeter.analysis.saved import analysed, phase_times, profile_tables
from specmeter.analysis.stalls import without_stalls
from specmeter.analysis.unit_means import Units, difference, ratio
from specmeter.errors import SpecmeterError
from specmeter.trace.plan import PHASES
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns, shared_ranks

SCHEMA = "specmeter/diff/1"
FEWEST_STARTS = 3
START_EFFECT = 0.06
START, PAIRED = "server start", "prompt, paired"
_ROUNDING = 1e-6
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Side:
    """One run's decode cycles of its leading rank, by prompt: means in ms, ``weights`` the cycles of each prompt.

    ``phases`` has the mean own time of each phase and of ``rest`` (what no leaf point covers), ``starts`` each prompt's
    server start.
    """

    prompts: tuple[str, ...]
    weights: Floats
    cycle_ms: Floats
    phases: dict[str, Floats]
    tokens: Floats
    starts: NDArray[np.int64]


def diff_runs(a: Run, b: Run) -> dict[str, Any]:
    """The document of ``specmeter diff`` (specmeter/diff/1). Raises SpecmeterError without a profile in both."""
    left, right = side(a), side(b)
    names = [p for p in (*PHASES, "rest") if p in left.phases or p in right.phases]
    unit = _unit(left, right)
    rows = [_row(name, left, right, left.phases.get(name), right.phases.get(name), unit) for name in names]
    cycle = _row("cycle", left, right, left.cycle_ms, right.cycle_ms, unit)
    sides = _units(left.cycle_ms, left, right, unit), _units(right.cycle_ms, right, left, unit)
    cycle["ratio"] = ratio(*sides, unit == PAIRED, unit).as_json()
    length = None
    if (left.tokens > 0).all() and (right.tokens > 0).all():
        length = _row("accept length", left, right, left.tokens, right.tokens, unit, "tokens")
    document = {
        "schema": SCHEMA, "version": __version__, "a": _about(a, left), "b": _about(b, right), "unit": unit,
        "changes": [asdict(change) for change in changes(a, b)], "cycle": cycle, "phases": rows,
        "accept_length": length,
        "speedup": {"a": _speedup(a), "b": _speedup(b)},
    }  # fmt: skip
    document["sentence"] = _sentence(document)
    return document


def side(run: Run) -> Side:
    """The decode cycles that the run's report is over, by prompt."""
    cycles, spans = profile_tables(run)
    _one_process(run, cycles)
    lead = (cycles["host"] == cycles["host"][0]) & (cycles["rank"] == cycles["rank"][0]) & analysed(run, cycles)
    chosen = without_stalls(cycles["dur_ns"], lead)
    if not chosen.any():
        raise SpecmeterError(f"{run.path} holds no decode cycle that counts", "Record longer.")
    prompt = cycles["prompt_id"].astype(str)
    if set(prompt[lead].tolist()) == {""}:
        prompt = np.char.add("block of 50 cycles ", (np.cumsum(lead) // 50).astype(str))
    names, at = np.unique(prompt[chosen], return_inverse=True)
    row = np.full(int(cycles["cycle"].max()) + 1, -1, np.int64)
    row[cycles["cycle"][chosen]] = at
    count = np.bincount(at).astype(float)
    cycle_ms = np.bincount(at, weights=cycles["dur_ns"][chosen] / 1e6) / count
    mine = (spans["host"] == cycles["host"][0]) & (spans["rank"] == cycles["rank"][0])
    phases = {name: seconds * 1e3 / count for name, seconds in phase_times(run, spans, mine, row).items()}
    phases["rest"] = cycle_ms - sum(phases.values(), np.zeros(len(names)))
    return Side(
        tuple(names.tolist()), count, cycle_ms, phases, _tokens(run, cycles, lead, prompt, names), _starts(run, names)
    )


def _one_process(run: Run, cycles: Columns) -> None:
    """Raise SpecmeterError where two processes share the leading rank: their cycles cannot be told apart."""
    if shared_ranks(cycles, leading=True):
        raise SpecmeterError(
            f"Two processes of {run.path} are recorded as one rank",
            "An earlier version gave data parallel copies of a server one number; their phases would be added up.",
            "Record the run again.",
        )


def _tokens(
    run: Run, cycles: Columns, lead: NDArray[np.bool_], prompt: NDArray[np.str_], names: NDArray[np.str_]
) -> Floats:
    """Mean tokens a cycle and sequence of each prompt, NaN where not known; what a stalled cycle yields counts too.

    Where cycles were sampled, the counts that were read in clean ones count as well, as in the report.
    """
    if run.analysis.get("sampling"):
        drawn = {**cycles, "probed": np.where(cycles["probed"] == 0, 1, cycles["probed"])}
        first = (cycles["host"] == cycles["host"][0]) & (cycles["rank"] == cycles["rank"][0])
        lead = first & analysed(run, drawn)
    of = np.flatnonzero(lead & np.isin(prompt, names) & (cycles["sampled"] >= 0))
    at = np.searchsorted(names, prompt[of])
    sampled = cycles["sampled"][of] / np.maximum(cycles["batch"][of], 1)
    total, count = np.bincount(at, weights=sampled, minlength=len(names)), np.bincount(at, minlength=len(names))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _starts(run: Run, prompts: NDArray[np.str_]) -> NDArray[np.int64]:
    requests = run.requests
    of = dict(zip(requests["prompt_id"].tolist(), requests["start"].tolist(), strict=True)) if requests else {}
    return np.array([int(of.get(p, 0)) for p in prompts.tolist()], np.int64)


def _unit(left: Side, right: Side) -> str:
    if min(len(set(s.starts.tolist())) for s in (left, right)) >= FEWEST_STARTS:
        return START
    return PAIRED if len(set(left.prompts) & set(right.prompts)) >= 2 else "prompt"


def _row(
    name: str, left: Side, right: Side, a: Floats | None, b: Floats | None, unit: str, key: str = "ms"
) -> dict[str, Any]:
    """Both means and B - A with its interval; a phase that one run lacks counts as 0 there."""
    x = np.zeros(len(left.prompts)) if a is None else a
    y = np.zeros(len(right.prompts)) if b is None else b
    ours, theirs = _units(x, left, right, unit), _units(y, right, left, unit)
    found = difference(ours, theirs, unit == PAIRED, unit)
    if found.low == -math.inf:
        word = "unclear"
    else:
        word = "more" if found.low > _ROUNDING else "less" if found.high < -_ROUNDING else "no difference seen"
    means = {f"a_{key}": ours.mean, f"b_{key}": theirs.mean}
    return {"name": name, **means, f"difference_{key}": found.as_json(), "word": word}


def _units(values: Floats, own: Side, other: Side, unit: str) -> Units:
    """One side's values by unit: its starts, the prompts that both sides share (in one order), or every prompt."""
    if unit == START:
        kept = [own.starts == k for k in np.unique(own.starts)]
        return Units(
            np.array([np.average(values[k], weights=own.weights[k]) for k in kept]),
            np.array([own.weights[k].sum() for k in kept]),
        )
    if unit == PAIRED:
        at = [own.prompts.index(p) for p in sorted(set(own.prompts) & set(other.prompts))]
        return Units(values[at], own.weights[at])
    return Units(values, own.weights)


def _about(run: Run, own: Side) -> dict[str, Any]:
    return {
        "path": str(run.path), "id": run.run.get("id"), "status": run.run.get("status"),
        "cycles": int(own.weights.sum()), "prompts": len(own.prompts), "starts": len(set(own.starts.tolist())),
        "verdict": (run.analysis.get("verdict") or {}).get("sentence"),
    }  # fmt: skip


def _speedup(run: Run) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = run.analysis.get("measured_speedup") or run.analysis.get("expected_speedup")
    return found


def _sentence(document: Mapping[str, Any]) -> str:
    """What a person should take from it, first."""
    found, unit = document["cycle"]["ratio"], document["unit"]
    percent = 100 * (found["point"] - 1)
    moved: Sequence[Mapping[str, Any]] = [row for row in document["phases"] if row["word"] in ("more", "less")]
    most = max(moved, key=lambda row: abs(row["difference_ms"]["point"]), default=None)
    if found["low"] is None or found["high"] is None:
        return f"B's cycle is {percent:+.1f} % of A's, without an interval: too few units ({unit})."
    if found["low"] <= 1 <= found["high"]:
        head = f"No difference seen between the cycles ({percent:+.1f} %)"
    else:
        head = f"B's cycle is {abs(percent):.1f} % {'longer' if percent > 0 else 'shorter'} than A's"
    where = "but" if found["low"] <= 1 <= found["high"] else "most"
    tail = f"; {where} in {most['name']} ({most['difference_ms']['point']:+.3f} ms)" if most else ""
    if unit == START:
        return f"{head}{tail}."
    small = abs(found["point"] - 1) < START_EFFECT
    why = "equal starts differ by as much" if small else "one start a side"
    return f"{head}{tail}; inconclusive across starts: {why}."
