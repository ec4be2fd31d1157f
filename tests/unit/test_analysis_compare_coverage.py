"""The intervals of compare and sweep, by simulation: start effects, drift across and within starts, autocorrelation.

The first tests vary the estimator's design by itself, the last ones go through what the commands call, from requests.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from specmeter.analysis.compare import ArmFacts, analyse_compare
from specmeter.analysis.starts import fit_starts, together_ratio
from specmeter.analysis.student import t_quantile
from specmeter.analysis.sweep import compare
from specmeter.trace import Request

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


def _request(setting: str, start: int, block: int, prompt: int, log_rate: float) -> Request:
    """One answer of 101 tokens that came at this rate."""
    took = round(100e9 * math.exp(-log_rate))
    return Request("r", f"p{prompt}", setting, block, 0, 1000, 1000 + took, 5, 101, "", start)


def _covers(found: dict[str, float] | None, truth: float) -> bool:
    assert found is not None
    return found["low"] <= math.exp(truth) <= found["high"]


def test_what_compare_calls_covers_from_requests_on() -> None:
    """Three arms in rounds of a drawn order, three starts each, blocks of two prompts of which the first is dropped."""
    rng = np.random.default_rng(11)
    effects = {"baseline": 0.0, "k=2": EFFECT, "k=4": -EFFECT}
    facts = [ArmFacts(name) for name in effects]
    covered = dict.fromkeys(effects, 0)
    for _ in range(EXPERIMENTS):
        order = [name for _ in range(3) for name in rng.permutation(list(effects)).tolist()]
        starts = rng.normal(size=9) * 0.02 + 0.1 * np.arange(9) / 8
        noise = _autocorrelated(rng, (9, 6), 0.8, 0.02) + 0.03 * np.exp(-np.arange(6))
        requests = [
            _request(
                name, start, at // 2, at % 2, 3.0 + effects[name] + starts[start] + 0.4 * (at % 2) + noise[start, at]
            )
            for start, name in enumerate(order)
            for at in range(6)
        ]
        for row in analyse_compare(facts, requests, 0.01)["pairs"]:
            covered[row["arm"]] += _covers(row["ratio"], effects[row["arm"]])
    assert all(0.93 <= covered[name] / EXPERIMENTS <= 0.97 for name in ("k=2", "k=4")), covered


@pytest.mark.parametrize("drift", [0.0, 0.2])
def test_what_sweep_calls_covers_across_starts(drift: float) -> None:
    """Two of four settings that have three starts each, in rounds of a drawn order, with a drift over the session."""
    rng = np.random.default_rng(12 + int(10 * drift))
    covered = 0
    for _ in range(EXPERIMENTS):
        order = np.concatenate([rng.permutation(4) for _ in range(3)])
        places = {side: np.flatnonzero(order == side) for side in (0, 1)}
        level = rng.normal(size=12) * 0.02 + drift * np.arange(12) / 11
        ours, theirs = (
            [_request("s", int(at), 0, 0, effect + level[at]) for at in places[side]]
            for side, effect in ((1, EFFECT), (0, 0.0))
        )
        found = compare(ours, theirs)
        assert found is not None and found.n == 3
        covered += found.low <= math.exp(EFFECT) <= found.high
    assert 0.93 <= covered / EXPERIMENTS <= 0.97, covered


@pytest.mark.parametrize("interaction", [0.0, 0.05])
def test_what_sweep_calls_covers_in_one_start(interaction: float) -> None:
    """Pairs of one block and prompt, settings in a drawn order, with a drift and noise that goes on between requests.

    Where a setting helps prompts differently the interval is for these prompts, and then on the safe side.
    """
    rng = np.random.default_rng(14)
    blocks, prompts, covered = 2, 6, 0
    for _ in range(EXPERIMENTS):
        count = 2 * blocks * prompts
        noise = _autocorrelated(rng, (1, count), 0.6, 0.03)[0] + 0.1 * np.arange(count) / count
        own, each = rng.normal(size=prompts) * 0.2, rng.normal(size=prompts) * interaction
        first = rng.integers(0, 2, size=blocks * prompts)
        sides: list[list[Request]] = [[], []]
        for at in range(blocks * prompts):
            block, prompt = divmod(at, prompts)
            for turn in range(2):
                side = int(first[at]) ^ turn
                effect = (EFFECT + each[prompt]) * side
                sides[side].append(_request("s", 0, block, prompt, own[prompt] + effect + noise[2 * at + turn]))
        found = compare(sides[1], sides[0])
        assert found is not None and found.n == blocks * prompts
        covered += found.low <= math.exp(EFFECT + each.mean()) <= found.high
    share = covered / EXPERIMENTS
    assert share >= 0.93 and (interaction > 0 or share <= 0.97), share
