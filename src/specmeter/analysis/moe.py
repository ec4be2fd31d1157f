"""Mixtures of experts: how many distinct experts a forward reads, which is what its weights cost."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specmeter.errors import SpecmeterError

_COUNT = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: ``total`` experts a layer, of which a token takes ``per_token``."""

    total: int
    per_token: int

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.total:
            raise SpecmeterError(
                f"Experts are given as {self.total}/{self.per_token}.",
                "A token takes at least one expert and at most all of them.",
                "Write TOTAL/PER_TOKEN, as 128/8.",
            )

    @classmethod
    def parse(cls, text: str) -> Experts:
        """``128/8``: 128 experts a layer, 8 a token. Raises SpecmeterError for anything else."""
        total, slash, per_token = text.partition("/")
        if not (slash and _COUNT.fullmatch(total.strip()) and _COUNT.fullmatch(per_token.strip())):
            raise SpecmeterError(f"{text[:40]!r} names no experts.", next_step="Write TOTAL/PER_TOKEN, as 128/8.")
        return cls(int(total), int(per_token))


def distinct_experts(experts: Experts, tokens: float) -> float:
    """Expected distinct experts that ``tokens`` tokens reach in one layer: E (1 - (1 - c/E)^n).

    An expert is missed by one token with probability 1 - c/E, so by n tokens with its n-th power (the occupancy
    problem: Feller, An Introduction to Probability Theory I, IV.2). It assumes that tokens choose independently and
    all experts alike; real routing of neighbouring tokens is correlated, so that this is an upper bound in practice.
    """
    missed = float((1.0 - experts.per_token / experts.total) ** tokens)
    return experts.total * (1.0 - missed)


def verify_work(tokens: float, experts: Experts | None) -> float:
    """The axis along which a verify forward's time is taken to be straight between two measured widths.

    A dense model: the tokens themselves (attention and arithmetic grow with them, weights are read once). A mixture of
    experts: the distinct experts, since reading their weights dominates at small batches.
    """
    return float(tokens) if experts is None else distinct_experts(experts, tokens)
