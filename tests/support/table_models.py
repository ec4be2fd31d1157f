"""Draws through speculative sampling over table models, and their comparison with exact probabilities.

The target and the draft are tables, p(next | token) and q(next | token), so that all probabilities are known and
tens of thousands of draws take seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from specmeter.eagle.accept import Accepted, accept
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.settings import Sampling
from specmeter.eagle.tree import DraftTree, start_growth

VOCAB, DRAFT_VOCAB, ROOT = 8, 6, 3
TARGET_IDS = torch.tensor([0, 2, 3, 4, 6, 7])
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
DRAFT = (TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)))[:, TARGET_IDS]
NO_HIDDEN = torch.zeros(1, 1)
SHAPES = {"chain": (1, 3, 4), "tree": (3, 3, 8)}
"""topk, steps, draft tokens."""

Accept = Callable[[DraftTree, Tensor, Tensor, Sampler], Accepted]


def speculate(sampler: Sampler, root: int, topk: int, steps: int, limit: int, accept_with: Accept) -> list[int]:
    """The tokens of one cycle after ``root``."""
    growth = start_growth(DRAFT[root][None], NO_HIDDEN, TARGET_IDS, topk, sampler)
    for _ in range(1, steps):
        growth.expand(DRAFT[growth.frontier], NO_HIDDEN.expand(len(growth.frontier), -1))
    tree = growth.finish(root, limit)
    return accept_with(tree, TARGET[tree.tokens], TARGET_IDS, sampler).tokens


def pairs(
    sampling: Sampling, topk: int, steps: int, limit: int, draws: int, accept_with: Accept = accept
) -> Counter[tuple[int, int]]:
    """How often each pair of first tokens came in ``draws`` runs, each going on until it has two."""
    sampler, counts = Sampler(sampling), Counter[tuple[int, int]]()
    for _ in range(draws):
        tokens = speculate(sampler, ROOT, topk, steps, limit, accept_with)
        if len(tokens) < 2:
            tokens += speculate(sampler, tokens[-1], topk, steps, limit, accept_with)
        counts[tokens[0], tokens[1]] += 1
    return counts


def exact(sampling: Sampling) -> np.ndarray:
    """The exact probability of each pair, [vocab, vocab]."""
    rows = torch.stack([Sampler(sampling).distribution(row) for row in TARGET]).double()
    return (rows[ROOT][:, None] * rows).numpy()


def p_values(counts: Counter[tuple[int, int]], expected: np.ndarray) -> tuple[float, float]:
    """Chi-square p-values of the first token's and of the pair's distribution; impossible pairs must not come."""
    observed = np.zeros_like(expected)
    for pair, count in counts.items():
        observed[pair] = count
    assert observed[expected == 0].sum() == 0
    return _p_value(observed.sum(1), expected.sum(1)), _p_value(observed.ravel(), expected.ravel())


def _p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    wanted = expected / expected.sum() * observed.sum()
    rare = wanted < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    present = wanted > 0
    return float(chisquare(observed[present], wanted[present]).pvalue)


def favour_drafts(tree: DraftTree, logits: Tensor, target_ids: Tensor, sampler: Sampler) -> Accepted:
    """A planted bias: one draft in twenty is kept without asking the target."""
    if sampler.uniform() < 0.05:
        logits = logits.clone()
        logits[0, tree.tokens[1]] = 50.0
    return accept(tree, logits, target_ids, sampler)
