"""The estimator of a drawn change: no bias, and intervals that cover, in cycles as machines make them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from specmeter.analysis.drawn_effect import drawn_effect

EXPERIMENTS = 1000
EFFECT = 0.003


def cycles(
    rng: np.random.Generator, count: int, share: float, waits: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Lengths with a wandering course, growth, heavy tails, and the effect; ``waits``: cycles after a change are lost.

    Losing them makes neighbours alike in their draws, as a mixture of code at each change does.
    """
    inside = rng.random(count) < share
    course = np.cumsum(rng.normal(0, 0.002, count)) + 0.1 * np.arange(count) / count
    calm = np.where(np.arange(count) % 400 < 300, 0.01, 0.03)  # a quarter of the time the machine is disturbed
    noise = calm * rng.standard_t(2.5, count) + (rng.random(count) < 0.02) * rng.exponential(0.3, count)
    length = np.exp(2.9 + course + noise + EFFECT * inside)
    keep = np.ones(count, bool)
    if waits:
        keep[1:] = inside[1:] == inside[:-1]
    return length[keep], inside[keep]


@pytest.mark.parametrize(("share", "waits"), [(0.5, False), (0.5, True), (0.1, False)])
def test_intervals_cover_and_the_mean_is_right(share: float, waits: bool) -> None:
    rng = np.random.default_rng(11)
    found = [drawn_effect(*cycles(rng, 800, share, waits)) for _ in range(EXPERIMENTS)]
    low, point, high = np.array([one for one in found if one is not None]).T
    assert len(point) == EXPERIMENTS
    # 5 standard errors of the mean of the experiments.
    assert abs(point.mean() - EFFECT) < 5 * point.std() / np.sqrt(EXPERIMENTS)
    assert 0.93 <= np.mean((low <= EFFECT) & (high >= EFFECT)) <= 0.975
    # It uses the neighbours: a plain difference of medians is several times as far off.
    assert point.std() < 0.5 * np.std([plain(*cycles(rng, 800, share, waits)) for _ in range(100)])


def plain(length: NDArray[np.float64], inside: NDArray[np.bool_]) -> float:
    return float(np.log(np.median(length[inside]) / np.median(length[~inside])))


def test_too_few_or_alike_draws_tell_nothing() -> None:
    length = np.linspace(1, 2, 40)
    assert drawn_effect(length, np.arange(40) < 9) is None
    assert drawn_effect(length, np.zeros(40, bool)) is None
    assert drawn_effect(np.zeros(0), np.zeros(0, bool)) is None


def test_a_scale_does_not_matter() -> None:
    length, inside = cycles(np.random.default_rng(2), 400, 0.5, False)
    one, other = drawn_effect(length, inside), drawn_effect(1e6 * length, inside)
    assert one is not None and other is not None and one == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize(("share", "effect"), [(0.05, 0.2), (0.5, 0.2), (0.9, -0.3)])
def test_a_large_effect_is_found_too(share: float, effect: float) -> None:
    rng = np.random.default_rng(3)
    inside = rng.random(4000) < share
    found = drawn_effect(np.exp(0.01 * rng.standard_normal(4000) + effect * inside), inside)
    assert found is not None and found[0] < effect < found[2] and found[2] - found[0] < 0.006
