"""Distributions and draws of one request."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specmeter.eagle.settings import Sampling

_TOP_P_SHORTLIST = 1024


class Sampler:
    """Turns logits into distributions and draws tokens from them, with the request's own random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.greedy = sampling.greedy
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._random = random.Random(sampling.seed)

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return self._random.random()

    def tempered(self, logits: Tensor) -> Tensor:
        """softmax(logits / temperature) in float32, [vocab] -> [vocab]."""
        return torch.softmax(logits.float() / self._temperature, dim=-1)

    def distribution(self, logits: Tensor) -> Tensor:
        """What the request samples from, temperature and top-p applied, [vocab] -> [vocab] in float32."""
        probabilities = self.tempered(logits)
        return probabilities if self._top_p >= 1.0 else keep_top_p(probabilities, self._top_p)

    def draw(self, probabilities: Tensor) -> int:
        """A token drawn from ``probabilities`` [vocab], which need not sum to 1."""
        cumulative = torch.cumsum(probabilities, 0, dtype=torch.float64)
        point = self.uniform() * cumulative[-1]
        token = int(torch.searchsorted(cumulative, point, right=True))
        return min(token, probabilities.shape[0] - 1)

    def choose(self, logits: Tensor) -> int:
        """The next token of plain decoding from ``logits`` [vocab]: the most probable one, or a draw."""
        return most_probable(logits[None])[0] if self.greedy else self.draw(self.distribution(logits))


def most_probable(logits: Tensor) -> list[int]:
    """The index of the largest value of each row of ``logits`` [rows, vocab], the first one of equals."""
    if logits.device.type != "cpu":
        there: list[int] = logits.float().argmax(-1).tolist()
        return there
    # numpy's argmax is vectorized; torch's over bfloat16 rows takes twenty times as long.
    found: list[int] = logits.float().numpy().argmax(-1).tolist()
    return found


def keep_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of likeliest tokens whose probabilities sum to ``top_p``, renormalized."""
    size = probabilities.shape[0]
    shortlist = min(_TOP_P_SHORTLIST, size)
    best = probabilities.topk(shortlist)
    cumulative = best.values.cumsum(0)
    if shortlist < size and float(cumulative[-1]) < top_p:
        best = probabilities.topk(size)
        cumulative = best.values.cumsum(0)
    values = torch.where(cumulative - best.values < top_p, best.values, 0.0)
    return torch.zeros_like(probabilities).scatter_(0, best.indices, values / values.sum())
