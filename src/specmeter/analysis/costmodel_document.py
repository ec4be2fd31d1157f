"""Rows of the cost model as JSON: chains of any length, and the trees worth trying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmeter.analysis.costmodel_curve import Row
from specmeter.analysis.costmodel_evidence import Evidence
from specmeter.analysis.costmodel_trees import TREE_ASSUMPTIONS, Tree, measured_trees, why_not


def row_json(row: Row) -> dict[str, Any]:
    """A row of the curve as JSON."""
    return {
        "steps": row.steps,
        "status": row.status,
        "cycle_ms": row.cycle_ms.as_json(),
        "accept_length_tokens": row.tokens.as_json(),
        "tokens_per_s": row.tok_s.as_json(),
        "break_even_tokens": row.break_even.as_json() if row.break_even else None,
        "speedup": row.speedup.as_json() if row.speedup else None,
        "gain": row.gain.as_json(),
        "phases_ms": dict(row.phases_ms),
        "one_more_step": {"ms": row.more_ms, "tokens": row.more_tokens, "pays": _pays(row)},
    }


def _pays(row: Row) -> bool | None:
    """Whether the last step brings tokens at a higher rate than the cycle as a whole has."""
    if row.more_ms is None or row.more_tokens is None:
        return None
    return row.more_tokens * row.cycle_ms.point > row.more_ms * row.tokens.point


def trees_json(evidence: Evidence, trees: Mapping[Tree, Row]) -> dict[str, Any]:
    """``{"reason", "rows", "assumptions"}``: a row for each tree, best first, or why there is none.

    ``measured_tokens`` is the accept length of a tree that ran as well, else None.
    """
    reason = why_not(evidence)
    seen = measured_trees(evidence)
    rows = [
        {**row_json(row), "topk": tree.topk, "draft_tokens": tree.tokens, "measured_tokens": seen.get(tree)}
        for tree, row in trees.items()
    ]
    return {"reason": reason, "rows": rows, "assumptions": [] if reason or not rows else list(TREE_ASSUMPTIONS)}
