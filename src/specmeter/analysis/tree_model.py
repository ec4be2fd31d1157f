"""Expected accept length of a draft tree, from chains whose failures tell the draft's own place of the right token.

A chain that fails at depth j shows which place r the draft gave to the token that the target has there: with r branches
the tree would have kept it. So a chain tells a_j(r), the share kept at depth j by the branch of place r, if the path
before was kept (acceptance by position of Chen et al., Sequoia, arXiv 2402.12374, section 3.1; here by depth as well).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmeter.analysis.acceptance_model import Length
from specmeter.errors import SpecmeterError

Floats = NDArray[np.float64]
# At a depth with few failures the shares lean to those of all depths, as if so many failures of theirs were added.
PRIOR = 20.0


def rank_acceptance(conditional: ArrayLike, missed: ArrayLike) -> Floats:
    """a_j(r), [depths, places]: ``conditional`` is c_1, c_2, ... of the chain, which is a_j(1).

    ``missed`` [depths, places] counts failures: all at place 1, and those whose right token had place 2, 3, ... beside.
    Raises SpecmeterError where no failure tells a place.
    """
    kept, counts = np.asarray(conditional, float), np.asarray(missed, float)
    total = counts.sum(axis=0)
    if not total[0]:
        raise SpecmeterError(
            "The draft's ranks were not recorded.",
            "A tree's accept length follows from the place that the draft gave to the token it should have drafted.",
            "Profile a chain with greedy decoding (--temperature 0) on the embedded engine, whose recipe reads them.",
        )
    depths = len(kept)
    own = np.zeros((depths, counts.shape[1]))
    shared = min(depths, len(counts))
    own[:shared] = counts[:shared]
    share = (own[:, 1:] + PRIOR * total[1:] / total[0]) / (own[:, :1] + PRIOR)
    return np.concatenate([kept[:, None], (1 - kept[:, None]) * share], axis=1)


def tree_length(accept: Floats, steps: int, topk: int, tokens: int) -> Length:
    """The accept length of the tree of ``steps`` and ``topk`` with ``tokens`` verified, root included.

    The tree grows as EAGLE-2's does (Li et al., arXiv 2406.16858): each step expands the ``topk`` likeliest paths by as
    many branches, and the likeliest ``tokens`` - 1 nodes are kept. Likely is meant on average here, where the engine
    goes by its draft's own probabilities, which knows more; and a branch of a further place is taken to go on as well
    as the first, which it does not. ``low`` lets nothing follow such a branch, ``high`` keeps every node grown.
    """
    depths, places = accept.shape
    if not 1 <= steps <= depths or not 1 <= topk <= places:
        raise SpecmeterError(
            f"A tree of {steps} steps and top-k {topk} cannot be predicted.",
            f"What was recorded tells of up to {depths} steps and {places} branches.",
        )
    scores = accept[0, :topk]
    straight = np.arange(topk) == 0
    grown, follows = [scores], [np.ones(topk, bool)]
    for depth in range(1, steps):
        wider = scores[:, None] * accept[depth, :topk]
        grown.append(wider.ravel())
        follows.append(np.repeat(straight, topk))
        best = np.argsort(-grown[-1], kind="stable")[:topk]
        straight = straight[best // topk] & (best % topk == 0)
        scores = grown[-1][best]
    nodes, sure = np.concatenate(grown), np.concatenate(follows)
    kept = np.argsort(-nodes, kind="stable")[: tokens - 1]
    low, found = float(nodes[kept][sure[kept]].sum()), float(nodes[kept].sum())
    return Length(1 + found, 1 + low, 1 + float(nodes.sum()), False)
