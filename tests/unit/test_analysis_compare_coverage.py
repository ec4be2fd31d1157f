"""The intervals of compare, by simulation: start effects, drift across and within starts, autocorrelated blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specmeter.analysis.starts import fit_starts, together_ratio
from specmeter.analysis.student import t_quantile

EXPERIMENTS = 2000
EFFECT = math.log(1.06)


def _autocorrelated(rng: np.random.Generator, shape: tuple[int, ...], rho: float, sd: float) -> np.ndarray:
    """Stationary AR(1) noise along the last axis."""
    noise = rng.normal(size=shape) * sd
    noise[..., 1:] *= math.sqrt(1 - rho**2)
    for i in range(1, shape[-1]):
        noise[..., i] += rho * noise[..., i - 1]
    return noise


def _sessions(starts: int, blocks: int, drift: float, rho: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Block logs [experiment, start, block] and sides [experiment, start] of rounds in a drawn order."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 2, size=(EXPERIMENTS, starts, 1))
    ours = np.concatenate([first, 1 - first], axis=2).reshape(EXPERIMENTS, 2 * starts)
    start_effect = rng.normal(size=(EXPERIMENTS, 2 * starts)) * 0.02
    place = np.arange(2 * starts)
    logs = EFFECT * ours + start_effect + drift * place / (2 * starts - 1)
    within = 0.01 * np.exp(-np.arange(blocks))  # every start warms up in the same way
    return logs[..., None] + within + _autocorrelated(rng, (EXPERIMENTS, 2 * starts, blocks), rho, 0.02), ours


def _coverage(logs: np.ndarray, ours: np.ndarray, starts: int) -> float:
    fit = fit_starts(logs, ours, np.broadcast_to(np.arange(2 * starts), logs.shape))
    half = t_quantile(0.975, fit.df) * fit.error
    return float(np.mean(np.abs(fit.difference - EFFECT) <= half))


@pytest.mark.parametrize("starts", [3, 5, 10])
@pytest.mark.parametrize("drift", [0.0, 0.1])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_separate_starts_cover(starts: int, drift: float, rho: float) -> None:
    logs, ours = _sessions(starts, 6, drift, rho, seed=starts * 100 + int(drift * 10) * 10 + int(rho * 10))
    assert 0.93 <= _coverage(logs[..., 1:].mean(-1), ours, starts) <= 0.97


def test_blocks_as_units_would_not_cover() -> None:
    logs, ours = _sessions(3, 6, 0.0, 0.0, seed=5)
    kept = logs[..., 1:]
    # The common mistake: 15 blocks a side taken as independent, though they come from 3 starts.
    flat, sides = kept.reshape(EXPERIMENTS, -1), np.repeat(ours, kept.shape[-1], axis=-1)
    order = np.broadcast_to(np.arange(flat.shape[-1]), flat.shape)
    fit = fit_starts(flat, sides, order)
    covered = np.abs(fit.difference - EFFECT) <= t_quantile(0.975, fit.df) * fit.error
    assert covered.mean() < 0.8


def test_a_drift_left_out_would_not_keep_the_level() -> None:
    logs, ours = _sessions(3, 6, 0.3, 0.0, seed=6)
    y = logs[..., 1:].mean(-1)
    a, b = y[ours == 1].reshape(EXPERIMENTS, 3), y[ours == 0].reshape(EXPERIMENTS, 3)
    error = np.sqrt(a.var(-1, ddof=1) / 3 + b.var(-1, ddof=1) / 3)
    covered = np.abs(a.mean(-1) - b.mean(-1) - EFFECT) <= t_quantile(0.975, 4) * error
    assert covered.mean() > 0.97  # far too wide: the drift is in the variance


@pytest.mark.parametrize("starts", [3, 6])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_arms_in_the_same_starts_cover(starts: int, rho: float) -> None:
    rng = np.random.default_rng(starts + int(10 * rho))
    blocks = 5
    # Machine noise goes on through a block's two requests; each setting also has an effect of its own in each start.
    machine = _autocorrelated(rng, (EXPERIMENTS, starts, 2 * blocks), rho, 0.03)
    trend = 0.1 * np.arange(2 * blocks) / (2 * blocks)
    first = rng.integers(0, 2, size=(EXPERIMENTS, starts, blocks))
    pair = (machine + trend).reshape(EXPERIMENTS, starts, blocks, 2)
    signed = np.where(first == 1, pair[..., 0] - pair[..., 1], pair[..., 1] - pair[..., 0])
    own = rng.normal(size=(EXPERIMENTS, starts)) * 0.01
    found = [together_ratio(row) for row in (signed + EFFECT).mean(-1) + own]
    covered = np.mean([interval.low <= math.exp(EFFECT) <= interval.high for interval in found])
    assert 0.93 <= covered <= 0.97
