"""How a draft grows: a chain (one token a step) or the dynamic tree of EAGLE-2 (Li et al., arXiv 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specmeter.eagle.sampling import Sampler, most_probable


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens under a root, the last token already produced.

    ``tokens`` are target ids with the root first, ``parents`` the index of each token's parent (-1 for the root);
    a parent comes before its children. ``proposals`` are the distributions over the draft vocabulary that a chain's
    tokens were drawn from, [draft_vocab] each, or empty if the tokens were chosen without chance; ``chosen_from`` are
    then the logits [1, draft_vocab] that each of a chain's tokens is the likeliest of, empty for a tree.
    """

    tokens: list[int]
    parents: list[int]
    proposals: tuple[Tensor, ...] = ()
    chosen_from: tuple[Tensor, ...] = field(default=(), compare=False)

    @property
    def is_chain(self) -> bool:
        """True if every token hangs from the one before it."""
        return self.parents == list(range(-1, len(self.tokens) - 1))

    def depths(self) -> list[int]:
        """Distance of each token from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def visible(self) -> Tensor:
        """Boolean [tokens, tokens]: True where the column is the row itself or one of its ancestors."""
        size = len(self.tokens)
        visible: NDArray[np.bool_] = np.zeros((size, size), dtype=np.bool_)
        visible[0, 0] = True
        for node in range(1, size):
            visible[node] = visible[self.parents[node]]
            visible[node, node] = True
        return torch.from_numpy(visible)


class Growth(Protocol):
    """A draft under construction. ``frontier`` [rows] are the target ids the draft runs next, ``hidden`` the draft
    outputs [rows, hidden] they follow from, ``visible`` their view of this draft's own slots (None: all of them)."""

    frontier: Tensor
    hidden: Tensor
    visible: Tensor | None

    def expand(self, logits: Tensor, hidden: Tensor) -> None:
        """Grows by one step from the frontier's draft logits [rows, draft_vocab] and outputs [rows, hidden]."""

    def probability(self) -> float:
        """The draft's own probability of the likeliest path to the frontier."""

    def finish(self, root: int, limit: int) -> DraftTree:
        """The tree of at most ``limit`` tokens, root included."""


class ChainGrowth:
    """One token a step: the draft's most probable one, or a draw from its distribution when the request samples."""

    visible: Tensor | None = None

    def __init__(self, logits: Tensor, hidden: Tensor, target_ids: Tensor, sampler: Sampler) -> None:
        """Starts from the draft's logits [1, draft_vocab] and output [1, hidden] at the last known position."""
        self._target_ids = target_ids
        self._sampler = sampler
        self._tokens: list[Tensor] = []
        self._proposals: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._drawn: list[int] = []
        self._asked = 0
        self._probability = 1.0
        self.expand(logits, hidden)

    def expand(self, logits: Tensor, hidden: Tensor) -> None:
        self.hidden = hidden
        if self._sampler.greedy:
            token = most_probable(logits)[0]
        else:
            proposal = self._sampler.tempered(logits[0])
            token = self._sampler.draw(proposal)
            self._proposals.append(proposal)
        self.frontier = self._target_ids.narrow(0, token, 1)
        self._tokens.append(self.frontier)
        self._logits.append(logits)
        self._drawn.append(token)

    def probability(self) -> float:
        # Only who asks pays for it. Every token asked about stays in the draft, so that what a later one is drawn from
        # depends on nothing but those before it, as speculative sampling wants.
        for logits, token in zip(self._logits[self._asked :], self._drawn[self._asked :], strict=True):
            self._probability *= float(torch.softmax(logits[0].float(), -1)[token])
        self._asked = len(self._drawn)
        return self._probability

    def finish(self, root: int, limit: int) -> DraftTree:
        tokens = [root, *(int(t) for t in self._tokens[: limit - 1])]
        chosen_from = () if self._proposals else tuple(self._logits[: limit - 1])
        return DraftTree(tokens, list(range(-1, len(tokens) - 1)), tuple(self._proposals[: limit - 1]), chosen_from)


class TreeGrowth:
    """The dynamic tree: every step expands the ``topk`` most probable paths by their ``topk`` likeliest tokens, and in
    the end the most probable paths over the whole tree are kept. A path's probability is the product of the draft's
    own probabilities along it."""

    def __init__(self, logits: Tensor, hidden: Tensor, target_ids: Tensor, topk: int) -> None:
        """Starts from the draft's logits [1, draft_vocab] and output [1, hidden] at the last known position."""
        self._target_ids = target_ids
        self._topk = topk
        scores, ids = self._likeliest(logits)
        self._scores = [scores[0]]
        self._ids = [ids[0]]
        self._parents = [torch.zeros(topk, dtype=torch.int64, device=logits.device)]
        self._count = 1 + topk
        self._frontier_scores = scores[0]
        self._frontier_nodes = torch.arange(1, 1 + topk, device=logits.device)
        self._own = torch.eye(topk, dtype=torch.bool, device=logits.device)
        self.frontier = self._target_ids[ids[0]]
        self.hidden = hidden.expand(topk, -1)
        self.visible: Tensor | None = self._own

    def expand(self, logits: Tensor, hidden: Tensor) -> None:
        scores, ids = self._likeliest(logits)
        scores = (scores + self._frontier_scores[:, None]).flatten()
        ids = ids.flatten()
        self._scores.append(scores)
        self._ids.append(ids)
        self._parents.append(self._frontier_nodes.repeat_interleave(self._topk))
        self._frontier_scores, best = scores.topk(self._topk)
        rows = best // self._topk
        self._frontier_nodes = self._count + best
        self._count += scores.shape[0]
        self.frontier = self._target_ids[ids[best]]
        self.hidden = hidden[rows]
        if self.visible is not None:
            self.visible = torch.cat([self.visible[rows], self._own], dim=-1)

    def probability(self) -> float:
        return float(self._frontier_scores.max().exp())

    def finish(self, root: int, limit: int) -> DraftTree:
        scores = torch.cat(self._scores)
        # A stable sort: among equal scores the earlier node wins, so no node is kept without its parent.
        kept = scores.sort(descending=True, stable=True).indices[: limit - 1].sort().values
        tokens = self._target_ids[torch.cat(self._ids)[kept]].tolist()
        parents = torch.cat(self._parents)[kept].tolist()
        place = {0: 0} | {node + 1: index for index, node in enumerate(kept.tolist(), 1)}
        return DraftTree([root, *tokens], [-1, *(place[parent] for parent in parents)])

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.log_softmax(logits.float(), dim=-1).topk(self._topk, dim=-1)
        return best.values, best.indices


def start_growth(logits: Tensor, hidden: Tensor, target_ids: Tensor, topk: int, sampler: Sampler) -> Growth:
    """The growth that ``topk`` calls for: a chain for 1, a tree above."""
    if topk == 1:
        return ChainGrowth(logits, hidden, target_ids, sampler)
    return TreeGrowth(logits, hidden, target_ids, topk)
