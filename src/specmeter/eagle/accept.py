"""Which drafted tokens the target keeps.

Greedy: the path that the target's own most probable tokens follow. Sampling: lossless, the tokens given out are
distributed as plain decoding's. For a chain whose tokens were drawn from the draft this is speculative sampling
(Leviathan et al., arXiv 2211.17192, algorithm 1): keep x with probability min(1, p(x)/q(x)), else draw from
max(p - q, 0). For a tree it is the multi-round rejection of SpecInfer (Miao et al., arXiv 2305.09781, algorithm 3) over
siblings. The tree's tokens are chosen without chance (q = 1 for each), so a sibling is kept with probability p(x)
over the mass the earlier siblings left, which is what one draw from p, looked up among the siblings, does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specmeter.eagle.sampling import Sampler, most_probable
from specmeter.eagle.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """``path`` are the kept nodes of the tree, root included; ``tokens`` the gain: their tokens without the root's,
    then the bonus token that the target adds."""

    path: list[int]
    tokens: list[int]


def accept(tree: DraftTree, logits: Tensor, target_ids: Tensor, sampler: Sampler) -> Accepted:
    """Keeps the part of ``tree`` that the target's ``logits`` [tokens, vocab] allow.

    ``target_ids`` [draft_vocab] maps the draft's vocabulary to the target's.
    """
    if sampler.greedy:
        return accept_greedy(tree, logits)
    if tree.proposals:
        return accept_drawn_chain(tree, logits, target_ids, sampler)
    return accept_fixed_tree(tree, logits, sampler)


def accept_greedy(tree: DraftTree, logits: Tensor) -> Accepted:
    """Follows the most probable token from the root for as long as it was drafted."""
    return _walk(tree, most_probable(logits).__getitem__)


def accept_fixed_tree(tree: DraftTree, logits: Tensor, sampler: Sampler) -> Accepted:
    """Follows draws from the target's distribution for as long as they were drafted."""
    return _walk(tree, lambda node: sampler.choose(logits[node]))


def accept_drawn_chain(tree: DraftTree, logits: Tensor, target_ids: Tensor, sampler: Sampler) -> Accepted:
    """Speculative sampling over a chain whose tokens were drawn from ``tree.proposals``."""
    for node, proposal in enumerate(tree.proposals):
        wanted, token = sampler.distribution(logits[node]), tree.tokens[node + 1]
        offered = wanted.new_zeros(wanted.shape).index_copy_(0, target_ids, proposal)
        if sampler.uniform() * float(offered[token]) >= float(wanted[token]):
            rest = (wanted - offered).clamp_(min=0.0)
            replacement = sampler.draw(rest)
            return Accepted(list(range(node + 1)), [*tree.tokens[1 : node + 1], replacement])
    last = len(tree.proposals)
    bonus = sampler.choose(logits[last])
    return Accepted(list(range(last + 1)), [*tree.tokens[1:], bonus])


def _walk(tree: DraftTree, next_token: Callable[[int], int]) -> Accepted:
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path, tokens = [0], [next_token(0)]
    while (node := children.get((path[-1], tokens[-1]))) is not None:
        path.append(node)
        tokens.append(next_token(node))
    return Accepted(path, tokens)
