"""Which of a run's records say what seams cost: the window of the same steps and batch, and none that is damaged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from specmeter.analysis.costmodel_device import windows_of
from specmeter.analysis.costmodel_seams import Seams, saved_seams
from specmeter.analysis.device_idle import CAUSES, WORK


def window(batch: int, idle: Any, steps: int = 3) -> dict[str, Any]:
    causes = {"causes_ms": {CAUSES[WORK]: idle}} if isinstance(idle, float) else idle
    return {"cycles": {"steps": steps, "batch": batch}, "idle": causes, "busy_ms": {"point": 1.0}}


def seams(path: Path, device: Any) -> Seams | None:
    """Of one run whose chains of 3 steps took 5 ms a cycle at batch 1, and 9 ms in fewer cycles at batch 8."""
    samples = [
        SimpleNamespace(steps=3, topk=1, cycles=10, batch=1.0, cycle_ms=np.array([50.0])),
        SimpleNamespace(steps=3, topk=1, cycles=2, batch=8.0, cycle_ms=np.array([18.0])),
    ]
    run = SimpleNamespace(path=path, analysis={"device": device, "steps": 3})
    runs = [cast(Any, run)]
    return saved_seams(runs, [w for each in runs for w in windows_of(each)], cast(Any, samples), 3)


def test_the_window_is_of_the_same_batch_and_no_more_than_a_cycle_has_left(tmp_path: Path) -> None:
    found = seams(tmp_path, {"windows": [window(8, 3.0), window(1, 2.0, steps=5), window(1, 0.5)]})
    assert found is not None and found.ms == pytest.approx(0.5)
    slow = seams(tmp_path, {"windows": [window(1, 7.0)]})
    assert slow is not None and slow.ms == pytest.approx(4.0)  # 5 ms of such a cycle, 1 busy
    assert seams(tmp_path, {"windows": [window(8, 3.0)]}) is None


@pytest.mark.parametrize("idle", [1, {"causes_ms": 3}, {"causes_ms": {CAUSES[WORK]: "much"}}, {"other": 1}])
def test_a_damaged_window_is_no_word_on_seams(tmp_path: Path, idle: Any) -> None:
    assert seams(tmp_path, {"windows": [window(1, idle)]}) is None
    points = seams(tmp_path, {"windows": [window(1, idle)], "idle_ms": {"point": 0.7}})
    assert points is not None and points.ms == pytest.approx(0.7)


@pytest.mark.parametrize("idle", [float("nan"), -1.0, "x", []])
def test_a_time_that_is_none_is_not_taken(tmp_path: Path, idle: Any) -> None:
    assert seams(tmp_path, {"idle_ms": {"point": idle}}) is None


@pytest.mark.parametrize("device", [5, [], {"windows": 3}, {"windows": [1, "x", None]}])
def test_what_is_no_window_is_none(tmp_path: Path, device: Any) -> None:
    assert seams(tmp_path, device) is None
