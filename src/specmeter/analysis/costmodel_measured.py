"""What the runs themselves measured against plain decoding: it comes before what the cost model says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmeter.analysis.costmodel_evidence import Evidence
from specmeter.analysis.profile import BASELINE
from specmeter.trace.rundir import Run


def measured_speedup(runs: Sequence[Run], evidence: Evidence) -> dict[str, Any] | None:
    """The ratio of decode rates, chain of the present steps over the baseline, that the first of the runs measured.

    ``{"steps", "ratio": interval, "run"}``; None where none measured it with an interval. A sweep has it by setting, a
    profile for the one that it ran with.
    """
    profiled = {s.steps for s in evidence.chains} == {evidence.now}
    for run in runs:
        document = run.analysis
        ratio = None
        if document.get("kind") == "sweep" and document.get("baseline") == BASELINE:
            ratio = next((arm.get("ratio") for arm in document.get("arms") or [] if _is(arm, evidence.now)), None)
        elif document.get("kind") == "profile" and profiled:
            ratio = document.get("measured_speedup")
        if ratio and ratio.get("low") is not None and ratio.get("high") is not None:
            return {"steps": evidence.now, "ratio": dict(ratio), "run": str(run.path)}
    return None


def _is(arm: Mapping[str, Any], steps: int) -> bool:
    settings = arm.get("settings") or {}
    return settings.get("steps") == steps and settings.get("topk", 1) == 1


def measured_words(measured: Mapping[str, Any]) -> str:
    """``Measured: 2 draft steps are 44 % faster than plain decoding [+18, +76 %].``, as far as the interval goes."""
    ratio, steps = measured["ratio"], measured["steps"]
    percents = [100 * (ratio[end] - 1) for end in ("point", "low", "high")]
    ends = f"[{percents[1]:+.0f}, {percents[2]:+.0f} %]"
    name, are = f"{steps} draft step{'' if steps == 1 else 's'}", "is" if steps == 1 else "are"
    if ratio["low"] > 1:
        return f"Measured: {name} {are} {percents[0]:.0f} % faster than plain decoding {ends}."
    if ratio["high"] < 1:
        return f"Measured: {name} {are} {-percents[0]:.0f} % slower than plain decoding {ends}."
    return f"Measured: {name} against plain decoding {percents[0]:+.0f} % {ends}, not told apart."
