"""What a tree would bring: its accept length from the draft's ranks, its cycle from the chains' phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specmeter.analysis.acceptance_lengths import Lengths
from specmeter.analysis.acceptance_model import Length
from specmeter.analysis.costmodel import Cost, CostModel, unit_weights
from specmeter.analysis.costmodel_curve import (
    Draw,
    Point,
    Row,
    baseline_ms,
    calibration,
    drawn_weights,
    logs_of,
    row_of,
)
from specmeter.analysis.costmodel_data import RANKS, Floats
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.analysis.tree_model import rank_acceptance, tree_length
from specmeter.errors import SpecmeterError

# Trees that are looked at where none is named: branches a step, and tokens verified (root included).
BRANCHES = (2, 3, 4, 8)
SIZES = (4, 6, 8, 12, 16, 24, 32)
SHOWN = 3
PREDICTED = "predicted"
# The name under which a predicted cycle holds what the further rows of a tree's draft steps take.
ROWS = "draft rows of a tree"
TREE_ASSUMPTIONS = (
    "a tree keeps at each depth what the draft's ranks in the failures of the chains say, on average over the contexts",
    "a branch of a further place goes on as well as the first one; the lower end of the accept length lets none go on",
    "a draft step of a tree takes more for its further rows as verify does, all of which is in the error; what keeping "
    "a tree takes beside (masks, ranking the paths) is not in it",
)
FEWEST_FAILURES = 50


@dataclass(frozen=True, order=True)
class Tree:
    """A tree of ``steps`` draft steps with ``topk`` branches each, of which ``tokens`` are verified, root included."""

    steps: int
    topk: int
    tokens: int

    @property
    def label(self) -> str:
        """As SGLang's three flags name it, steps/top-k/draft tokens: ``3/4/8``."""
        return f"{self.steps}/{self.topk}/{self.tokens}"

    @property
    def largest(self) -> int:
        """The most tokens that so many steps and branches grow, root included."""
        return 1 + self.topk + (self.steps - 1) * self.topk**2


def why_not(evidence: Evidence) -> str:
    """Why no tree can be predicted from this evidence; empty where one can."""
    if round(evidence.batch) != 1:
        return "the draft's ranks are told of one sequence at a time only"
    failures = _missed(evidence, None)[:, 0].sum()
    if failures < FEWEST_FAILURES:
        told = f"of {failures:.0f} failures only" if failures else "of no failure"
        return f"the draft's ranks were recorded {told} (greedy chains of the embedded engine tell them)"
    return ""


def tree_rows(evidence: Evidence, trees: Sequence[Tree], seed: int = 0) -> tuple[Row, ...]:
    """A row for each of ``trees``, in their order; ``status`` is ``predicted``, ``gain`` is over the present chain.

    Intervals as ``curve`` has them; the accept length's slack reaches from a tree whose further branches end there to
    one of which no node is cut off. Raises SpecmeterError where the evidence tells of no such tree.
    """
    reason = why_not(evidence)
    if reason:
        raise SpecmeterError("No tree can be predicted.", f"{reason[0].upper()}{reason[1:]}.")
    centre, present = _points(evidence, None, trees, slack=True)
    draws: list[list[tuple[float, ...]]] = [[] for _ in trees]
    for weights in drawn_weights(evidence, seed):
        try:
            found, rate = _points(evidence, weights, trees)
        except (SpecmeterError, ZeroDivisionError):
            continue  # a draw that holds no failure says nothing
        for rows, point in zip(draws, found, strict=True):
            rows.append(logs_of(point, rate))
    units = len({unit for s in evidence.samples for unit in s.units})
    return tuple(
        replace(
            row_of(tree.steps, evidence, point, present, np.array(rows), units, None, None),
            status=PREDICTED, more_ms=None, more_tokens=None,
        )
        for tree, point, rows in zip(trees, centre, draws, strict=True)
    )  # fmt: skip


def likely_trees(evidence: Evidence, count: int = SHOWN) -> tuple[Tree, ...]:
    """The ``count`` trees with the most tokens a second as far as is known, best first; empty where none can be told.

    No tree verifies more than twice the tokens that were ever verified, nor is it deeper than the chains.
    """
    if why_not(evidence):
        return ()
    widest = 2 * max(s.width for s in evidence.chains)
    deepest = len(Lengths(evidence, None, Assumed()).rates)
    tried = [Tree(k, topk, n) for k in range(2, deepest + 1) for topk in BRANCHES for n in SIZES]
    trees = [tree for tree in tried if tree.steps + 1 < tree.tokens <= min(widest, tree.largest)]
    points, _ = _points(evidence, None, trees)
    ranked = sorted(zip(trees, points, strict=True), key=lambda pair: -pair[1].rate)
    return tuple(tree for tree, _ in ranked[:count])


def predicted_trees(evidence: Evidence) -> dict[Tree, Row]:
    """Rows of the likeliest trees, best first, and of those that were measured as far as chains tell of them."""
    trees = list(likely_trees(evidence))
    if not trees:
        return {}
    deepest = len(Lengths(evidence, None, Assumed()).rates)
    known = [t for t in measured_trees(evidence) if t.steps <= deepest and t.topk <= RANKS and t not in trees]
    return dict(zip([*trees, *known], tree_rows(evidence, [*trees, *known]), strict=True))


def measured_trees(evidence: Evidence) -> dict[Tree, float]:
    """The accept length (tokens) of each tree that the evidence holds itself."""
    found = {}
    for s in evidence.samples:
        if s.topk > 1 and s.accepts and round(s.batch) == 1:
            kept = s.kept.sum(axis=0)
            found[Tree(s.steps, s.topk, round(s.width))] = float(1 + kept[1:].sum() / kept[0])
    return found


def _points(
    evidence: Evidence, weights: Mapping[str, float] | None, trees: Sequence[Tree], slack: bool = False
) -> tuple[list[Point], float]:
    """A point for each tree, and tokens a second of the chain at present."""
    draw = Draw(evidence, weights)
    _, present = draw.points([evidence.now], Assumed())
    accept = rank_acceptance(Lengths(evidence, weights, Assumed()).rates, _missed(evidence, weights))
    base = baseline_ms(evidence, weights, None)
    found = []
    for tree in trees:
        length = tree_length(accept, tree.steps, tree.topk, tree.tokens)
        ratio = calibration(evidence, draw.model, tree.steps, weights)
        cost, rows_ms = _cost(draw.model, tree, length)
        off = draw.model.slack_ms(tree.steps, None, evidence.apart, tree.tokens) + rows_ms if slack else 0.0
        found.append(Point(cost.times(ratio), length, base, ratio * off))
    return found, present


def _cost(model: CostModel, tree: Tree, length: Length) -> tuple[Cost, float]:
    """The cycle of a tree, and of it the ms that its draft steps take for their further rows.

    A draft step of a tree runs ``topk`` rows. Its layer is built as the target's are, so it is taken to grow with its
    rows as verify does; all of that growth is slack, since no chain shows it.
    """
    cost = model.cycle(tree.steps, length.tokens, None, tree.tokens)
    wide = model.verify_parts(tree.topk - 1)
    grows = wide["width"] / wide["once"] if wide["once"] > 0 else 0.0
    loop = sum(m.step.at(model.batch) for m in model.models if m.step is not None) * (tree.steps - 1)
    rows_ms = loop * grows
    phases = {**cost.phases, "draft": cost.phases.get("draft", 0.0) + rows_ms}
    return Cost({**cost.points, ROWS: rows_ms}, phases), rows_ms


def _missed(evidence: Evidence, weights: Mapping[str, float] | None) -> Floats:
    """Failures by depth and place over all chains, [depths, RANKS]."""
    deepest = max((s.steps for s in evidence.chains), default=0)
    found = np.zeros((deepest, RANKS))
    for s in evidence.chains:
        if s.missed.size:
            found[: s.steps] += np.einsum("u,usr->sr", unit_weights(s, weights), s.missed)
    return found
