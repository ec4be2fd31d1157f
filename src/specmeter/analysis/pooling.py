"""Whether two runs measured one and the same server under one load, so that one model may be fitted to both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from specmeter.analysis.costmodel_data import Sample, samples_of
from specmeter.analysis.diff import START_EFFECT
from specmeter.analysis.stats import Interval, ratio_interval
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import Run

Facts = Mapping[str, str | None]


def facts_of(run: Run) -> dict[str, str | None]:
    """What a run records of its engine, machine and prompts, by name; None where it does not."""
    document, plan, machine = run.analysis, run.plan, run.run.get("machine") or {}
    engine = document.get("engine") or {}
    cycles = run.cycles
    hosts = sorted(set(cycles["host"].astype(str).tolist())) if cycles and len(cycles["host"]) else []
    return {
        "engine": _text(engine.get("name") or plan.get("engine")),
        "engine version": _text(engine.get("version") or plan.get("engine_version")),
        "Python": _text((plan.get("python") or {}).get("version")),
        "host": ", ".join(hosts) or None,
        "processors": _text(machine.get("cpus")),
        "architecture": _text(machine.get("machine")),
        "prompts": _text(run.run.get("prompts")),
    }


def differences(runs: Sequence[Run], facts: Sequence[Facts]) -> list[str]:
    """Why the runs are not of one server under one load, a line for each reason; empty where nothing speaks against it.

    ``facts`` are what each run states, compared where both do; on top, the baselines that two runs measured: equal
    starts differ by up to START_EFFECT, and a ratio whose 95 % interval lies beyond that is another machine or load.
    """
    found = []
    for at in range(1, len(runs)):
        for name in facts[0]:
            here, there = facts[0][name], facts[at].get(name)
            if here is not None and there is not None and here != there:
                found.append(f"{name}: {here} in {runs[0].path}, {there} in {runs[at].path}")
        found += _baselines(runs[0], runs[at])
    return found


def check_pool(runs: Sequence[Run], facts: Sequence[Facts], pool: bool = False) -> list[str]:
    """``differences``; raises SpecmeterError where there are any, unless the runs are to be pooled anyway."""
    found = differences(runs, facts)
    if found and not pool:
        raise SpecmeterError(
            "These runs are not one measurement: a model of both would mix two servers or loads.",
            "; ".join(found) + ".",
            "Explain each by itself, or measure them alike; --pool takes them together anyway.",
        )
    return found


def _baselines(one: Run, other: Run) -> Iterator[str]:
    pairs = [(a, b) for a in _plain_samples(one) for b in _plain_samples(other) if round(a.batch) == round(b.batch)]
    for a, b in pairs:
        yield from _apart(one, other, ratio_interval(_step_ms(b), _step_ms(a), "prompt"))
    known = [run.analysis.get("baseline") for run in (one, other)]  # a sweep's is a setting's name
    saved = [base.get("step_ms") if isinstance(base, Mapping) else None for base in known]
    if not pairs and all(step and step.get("low") and step.get("high") for step in saved):
        x, y = (step or {} for step in saved)
        ends = Interval(y["low"] / x["high"], y["point"] / x["point"], y["high"] / x["low"], 0.95, "ends", x["n"], "")
        yield from _apart(one, other, ends)


def _apart(one: Run, other: Run, ratio: Interval) -> Iterator[str]:
    if ratio.low > 1 + START_EFFECT or ratio.high < 1 / (1 + START_EFFECT):
        yield (
            f"baseline step: {other.path} takes {ratio.point:.3f} times that of {one.path} (95 % interval "
            f"{ratio.low:.3f} to {ratio.high:.3f}; equal starts differ by up to {100 * START_EFFECT:.0f} %)"
        )


def _plain_samples(run: Run) -> list[Sample]:
    try:
        return [s for s in samples_of([run]) if s.steps == 0]
    except SpecmeterError:  # said by the model itself, with its next step
        return []


def _step_ms(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    there = sample.count > 0
    return np.asarray(sample.cycle_ms[there] / sample.count[there], np.float64)


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value)
