"""Draft trees, top-p, and how often a drawn chain is kept (whole distributions: integration/test_eagle_lossless.py)."""

from __future__ import annotations

import pytest
import torch

from specmeter.eagle.accept import accept
from specmeter.eagle.sampling import Sampler, keep_top_p
from specmeter.eagle.settings import Sampling
from specmeter.eagle.tree import DraftTree, start_growth
from tests.support.table_models import DRAFT, NO_HIDDEN, ROOT, TARGET, TARGET_IDS, VOCAB, speculate

DRAWS = 4000


def test_a_drawn_chain_accepts_as_often_as_theory_says() -> None:
    sampler, accepted = Sampler(Sampling(temperature=1.0, seed=11)), 0
    for _ in range(DRAWS):
        accepted += len(speculate(sampler, ROOT, 1, 1, 2, accept)) - 1
    offered = torch.zeros(VOCAB).index_copy_(0, TARGET_IDS, torch.softmax(DRAFT[ROOT], -1))
    theory = float(torch.minimum(torch.softmax(TARGET[ROOT], -1), offered).sum())
    assert accepted / DRAWS == pytest.approx(theory, abs=4 * (theory * (1 - theory) / DRAWS) ** 0.5)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert keep_top_p(probabilities, 0.6).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert keep_top_p(probabilities, 0.05).tolist() == [0, 1, 0, 0]
    # More tokens are needed than the shortlist holds.
    flat = torch.full((3000,), 1 / 3000)
    assert int((keep_top_p(flat, 0.9) > 0).sum()) == pytest.approx(2700, abs=2)


def test_tree_keeps_the_most_probable_paths_over_the_whole_tree() -> None:
    sampler = Sampler(Sampling())
    growth = start_growth(DRAFT[ROOT][None], NO_HIDDEN, TARGET_IDS, 3, sampler)
    for _ in range(2):
        growth.expand(DRAFT[growth.frontier], NO_HIDDEN.expand(3, -1))
    full, small = growth.finish(ROOT, 22), growth.finish(ROOT, 8)
    scores = [path_score(full, node) for node in range(1, len(full.tokens))]
    kept = sorted((path_score(small, node) for node in range(1, 8)), reverse=True)
    assert kept == pytest.approx(sorted(scores, reverse=True)[:7])
    assert all(parent < node for node, parent in enumerate(small.parents))
    assert len({(p, t) for p, t in zip(full.parents, full.tokens, strict=True)}) == 22


def path_score(tree: DraftTree, node: int) -> float:
    """The sum of the draft's log-probabilities along the path to ``node``."""
    score = 0.0
    while node:
        parent = tree.parents[node]
        row = torch.log_softmax(DRAFT[tree.tokens[parent]], -1)
        score += float(row[TARGET_IDS.tolist().index(tree.tokens[node])])
        node = parent
    return score


def test_depths_and_ancestors_of_a_tree() -> None:
    tree = DraftTree([0, 1, 2, 3], [-1, 0, 0, 2])
    assert tree.depths() == [0, 1, 1, 2]
    assert tree.visible().int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert not tree.is_chain and DraftTree([5, 6, 7], [-1, 0, 1]).is_chain
