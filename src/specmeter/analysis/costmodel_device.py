"""A draft step as the device sees it: where the device is what a cycle waits for, its time is the price of a step.

A draft loop in one captured graph takes the host the same time however long it is, and under overlap scheduling the
host's times of a phase are not the device's. So a deep window of the run gives the step, where there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmeter.analysis.costmodel_data import Sample
from specmeter.analysis.device_report import saved_device
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import Run

# What a step of another place in the chain, or a verify of another width, may make of it. A choice, not a law:
# benchmarks/explain_recorded.py compares predictions with measurements.
STEP_SLACK = 0.1
WAIT = "wait"
BOUND = "device-bound"


@dataclass(frozen=True)
class DeviceStep:
    """``ms`` of one draft step on the device, in a window at ``steps`` draft steps and so many sequences (``batch``).

    ``factor`` is what a what-if makes of the step.
    """

    ms: float
    steps: int
    batch: int
    factor: float = 1.0

    def more_ms(self, steps: int) -> float:
        """What a cycle of ``steps`` takes more than the one that was measured, for its draft steps; the first draft
        comes from the extend phase."""
        return self.ms * (self.factor * max(0, steps - 1) - (self.steps - 1))

    def slack_ms(self, steps: int) -> float:
        """How far off that may be."""
        return STEP_SLACK * self.ms * abs(steps - self.steps)

    def into(self, phases: Mapping[str, float], steps: int) -> dict[str, float]:
        """The host's phases with it: it is the host's waits that grow or shrink, and then what else is longest."""
        found = {**phases, WAIT: phases.get(WAIT, 0.0) + self.more_ms(steps)}
        while found[WAIT] < 0 and len(found) > 1:
            longest = max(found, key=lambda name: found[name])
            if longest == WAIT or found[longest] <= 0:
                break
            taken = min(-found[WAIT], found[longest])
            found[longest], found[WAIT] = found[longest] - taken, found[WAIT] + taken
        return found


def device_step(windows: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> DeviceStep | None:
    """The step of the first window (``windows_of``) at the chains' one step count and bound by the device; else None.

    With several step counts the cycles themselves show what a step costs.
    """
    steps = {s.steps for s in samples if s.steps > 0 and s.topk == 1}
    if len(steps) != 1:
        return None
    batches = {round(s.batch) for s in samples if s.steps in steps}
    for window in windows:
        cycles = window.get("cycles") or {}
        ms = _step_ms(window)
        if cycles.get("steps") in steps and cycles.get("batch") in batches and ms is not None:
            return DeviceStep(ms, int(cycles["steps"]), int(cycles["batch"]))
    return None


def windows_of(run: Run) -> list[dict[str, Any]]:
    """What is known of a run's deep windows; empty without any, or where they are damaged."""
    document = run.analysis
    if (run.path / "deep").is_dir():
        with contextlib.suppress(SpecmeterError):  # a damaged window is said by `report`, and the model does without
            document = saved_device(run).analysis
    device = document.get("device")
    windows = device.get("windows") if isinstance(device, dict) else None
    return [window for window in windows if isinstance(window, dict)] if isinstance(windows, list) else []


def _step_ms(window: Mapping[str, Any]) -> float | None:
    """The mean step inside the draft's graphs; of a graph whose steps are not told apart, its busy time over them."""
    if (window.get("bound") or {}).get("word") != BOUND:
        return None
    told = [row["ms"] for row in window.get("draft_steps") or [] if row["step"]]
    if told:
        return float(np.mean(told))
    steps = int(window["cycles"]["steps"] or 0)
    graphs = [row for row in window["phases"] if row["phase"] == "draft" and row["graph_launches"]]
    if steps < 2 or len(graphs) != 1 or round(graphs[0]["graph_launches"]) != 1:
        return None
    return float(graphs[0]["busy_ms"]) / (steps - 1)
