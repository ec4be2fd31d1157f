"""Expected accept length of a chain of any length, from acceptance by position measured once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmeter.errors import SpecmeterError

# Positions that stand for those beyond the longest chain measured: the last two, since the first are different.
TAIL = 2


@dataclass(frozen=True)
class Length:
    """An expected accept length in tokens a cycle, bonus included.

    ``extrapolated`` says that the chain is longer than any measured; ``low`` and ``high`` then are what it would be if
    no further draft were kept, or all as often as at the best position measured.
    """

    tokens: float
    low: float
    high: float
    extrapolated: bool


def expected_length(conditional: Sequence[float] | NDArray[np.float64], steps: int) -> Length:
    """1 + c1 + c1 c2 + ... up to ``steps`` factors; ``conditional`` holds c1, c2, ... of the longest chain measured.

    A cycle keeps the drafts before the first one that fails and gains the target's own token besides. With one
    acceptance rate a for all positions it is (1 - a^(k+1)) / (1 - a): Leviathan et al., Fast Inference from
    Transformers via Speculative Decoding (arXiv 2211.17192), equation 1. Assumes that a draft's chance depends on its
    position only, and not on how long the chain is in which it stands.
    """
    if steps < 0:
        raise SpecmeterError(f"A chain of {steps} steps does not exist.")
    known = np.asarray(conditional, float)[:steps]
    inside = np.cumprod(known)
    base = 1.0 + float(inside.sum())
    beyond = steps - len(known)
    if beyond == 0:
        return Length(base, base, base, False)
    if not len(known):
        raise SpecmeterError(
            "No acceptance by position was recorded.",
            "Accept lengths of other step counts follow from it.",
            "Profile with a recipe that reads the accepted counts.",
        )
    last, tail, best = float(inside[-1]), float(known[-TAIL:].mean()), float(known.max())
    return Length(base + last * _powers(tail, beyond), base, base + last * _powers(best, beyond), True)


def _powers(rate: float, count: int) -> float:
    """rate + rate^2 + ... + rate^count."""
    return float(sum(rate**i for i in range(1, count + 1)))


def conditional_acceptance(kept: ArrayLike) -> NDArray[np.float64]:
    """c1, c2, ... from the number of sequences that kept at least 0, 1, 2, ... drafts.

    Ends at the last position that any sequence reached, since beyond it nothing is known.
    """
    counts = np.asarray(kept, float)
    before = counts[:-1]
    reached = before > 0
    known = len(before) if bool(reached.all()) else int(np.argmin(reached))
    return np.asarray(counts[1 : known + 1] / before[:known], float)


def conditional_from_lengths(lengths: Sequence[tuple[int, float]], most: int) -> NDArray[np.float64]:
    """c1, c2, ... up to position ``most``, falling geometrically, that give two accept lengths measured at two steps.

    c_j = a d^(j-1): two numbers, so two lengths fix them. For published figures that give no acceptance by position;
    found by bisection on d with a inside, both sides being monotone. Raises SpecmeterError where none fits.
    """
    (k1, first), (k2, second) = sorted(lengths)
    low, high = 0.0, 1.5
    for _ in range(60):
        decay = (low + high) / 2
        rate = _rate_for(decay, k1, first)
        if expected_length(_falling(rate, decay, k2), k2).tokens < second:
            low = decay
        else:
            high = decay
    decay = (low + high) / 2
    rate = _rate_for(decay, k1, first)
    found = _falling(rate, decay, most)
    if abs(expected_length(found, k2).tokens - second) > 0.005 * second:
        raise SpecmeterError(f"Accept lengths {first} at {k1} and {second} at {k2} steps fit no falling acceptance.")
    return found


def _falling(rate: float, decay: float, count: int) -> NDArray[np.float64]:
    return np.asarray(np.minimum(1.0, rate * decay ** np.arange(count)), float)


def _rate_for(decay: float, steps: int, length: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if expected_length(_falling(rate, decay, steps), steps).tokens < length:
            low = rate
        else:
            high = rate
    return (low + high) / 2
