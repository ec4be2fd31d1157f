"""Intervals against scipy and against simulated experiments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from specmeter.analysis.acceptance import clusters
from specmeter.analysis.stats import (
    Interval,
    cluster_ratio,
    drift_test,
    mean_interval,
    paired_ratio,
    ratio_interval,
    verdict,
)
from specmeter.analysis.student import t_cdf, t_quantile

EXPERIMENTS = 2000
# 95 % of 2,000 experiments have a standard error of 0.5 %.
LOW, HIGH = 0.93, 0.97


def covered(intervals: list[Interval], truth: float) -> float:
    return float(np.mean([i.low <= truth <= i.high for i in intervals]))


@pytest.mark.parametrize(
    ("cycles", "name"),
    [(range(6), "block of 6 cycles"), (range(100), "block of 50 cycles"), (range(3, 4), "block of 1 cycle"),
     (range(40, 60), "block of 10 cycles"), (range(120), "block of up to 50 cycles"), ([2, 2, 3], "block of 2 cycles")],
)  # fmt: skip
def test_a_block_is_named_by_the_cycles_that_it_holds(cycles: list[int], name: str) -> None:
    at = np.array(cycles, np.int64)
    unit, said = clusters(np.zeros(len(at), np.int32), at)
    assert said == name and unit.tolist() == [cycle // 50 for cycle in cycles]


@given(st.floats(0.5001, 0.9999), st.integers(1, 5000))
def test_t_quantile_is_scipys(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(float(scipy.stats.t.ppf(p, df)), rel=1e-6, abs=1e-8)
    assert t_cdf(1.7, df) == pytest.approx(float(scipy.stats.t.cdf(1.7, df)), rel=1e-9)


def test_mean_and_welch_intervals_are_scipys() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(5, 1, 12), np.exp(rng.normal(1, 0.2, 9))
    expected = scipy.stats.t.interval(0.95, 11, x.mean(), scipy.stats.sem(x))
    found = mean_interval(x, "request")
    assert (found.low, found.high) == pytest.approx(expected)
    logs = scipy.stats.ttest_ind(np.log(x), np.log(y), equal_var=False).confidence_interval(0.95)
    ratio = ratio_interval(x, y, "server start")
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((logs.low, logs.high), rel=1e-4)


def test_ratio_across_starts_covers_with_start_effects() -> None:
    rng = np.random.default_rng(3)
    intervals = [
        ratio_interval(np.exp(rng.normal(0.1, 0.03, 5)), np.exp(rng.normal(0, 0.03, 5)), "server start")
        for _ in range(EXPERIMENTS)
    ]
    assert LOW <= covered(intervals, math.exp(0.1)) <= HIGH


def test_cluster_ratio_covers_where_cycles_of_a_request_are_alike() -> None:
    rng = np.random.default_rng(4)
    clustered, naive = [], []
    for _ in range(EXPERIMENTS):
        size = rng.integers(20, 40, 20)
        level = rng.normal(1.0, 0.3, 20)
        accepted = [level[i] + rng.normal(0, 0.5, n) for i, n in enumerate(size)]
        clustered.append(cluster_ratio([a.sum() for a in accepted], size, "request"))
        naive.append(mean_interval(np.concatenate(accepted), "cycle"))
    assert LOW <= covered(clustered, 1.0) <= HIGH
    assert covered(naive, 1.0) < 0.7  # the simulation does have clusters: cycles as units would lie


def test_verdict_needs_the_whole_interval_beyond_the_threshold() -> None:
    def interval(low: float, high: float) -> Interval:
        return Interval(low, (low + high) / 2, high, 0.95, "", 9, "block")

    assert verdict(interval(1.02, 1.1)) == "faster"
    assert verdict(interval(1.005, 1.1), 0.01) == "inconclusive"
    assert verdict(interval(0.9, 0.98), 0.01) == "slower"
    assert verdict(interval(0.9, 1.1)) == "inconclusive"
    assert verdict(paired_ratio([2.0], [1.0], "block")) == "inconclusive"
    assert verdict(None) == "inconclusive"


def test_drift_is_found_and_not_invented() -> None:
    rng = np.random.default_rng(6)
    t = np.arange(100.0)
    falling = drift_test(t, np.exp(-0.001 * t + rng.normal(0, 0.01, 100)))
    assert falling is not None and falling.percent == pytest.approx(-9.4, abs=1) and falling.p_value < 1e-6
    flat = [drift_test(t, np.exp(rng.normal(0, 0.01, 100))) for _ in range(400)]
    assert np.mean([d.p_value < 0.05 for d in flat if d]) < 0.09
