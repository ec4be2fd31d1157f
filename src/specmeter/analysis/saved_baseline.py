"""The baseline step that a saved run measured, for a run or a view that measures none itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from specmeter.analysis.stats import Interval
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import Run, load

_FIELDS = ("point", "level", "method", "n", "unit")


def baseline_step(analysis: Mapping[str, Any]) -> Interval | None:
    """The baseline step of an analysis document, ms; None where it measured none.

    A sweep's ``baseline`` is the name of a setting and no step. An end that is null, as of a single request, is
    infinite: too few units for an interval.
    """
    base = analysis.get("baseline")
    step = base.get("step_ms") if isinstance(base, Mapping) else None
    if not isinstance(step, Mapping) or any(step.get(name) is None for name in _FIELDS) or not step["point"] > 0:
        return None
    low, high = step.get("low"), step.get("high")
    return Interval(
        -math.inf if low is None else low, step["point"], math.inf if high is None else high,
        step["level"], step["method"], step["n"], step["unit"],
    )  # fmt: skip


def named_step(run: Run) -> Interval:
    """The baseline step, ms, of the run that ``--baseline`` names.

    Raises SpecmeterError where it measured none, with those of the runs below it that did.
    """
    step = baseline_step(run.analysis)
    if step is not None:
        return step
    below: list[str] = []
    for path in sorted((run.path / "children").glob("*/")):
        with contextlib.suppress(SpecmeterError):  # a damaged one is none to name
            below += [str(path)] if baseline_step(load(path).analysis) is not None else []
    kind = run.analysis.get("kind")
    raise SpecmeterError(
        f"{run.path} holds no baseline step.",
        f"Its analysis is of kind {kind!r}; a profile measures one." if kind not in (None, "profile") else "",
        f"Name {' or '.join(below)}." if below else "Name a run of `specmeter profile` that measured one.",
    )
