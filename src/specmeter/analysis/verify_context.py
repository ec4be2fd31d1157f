"""Verify against a plain step by the length of the context, which attention reads and weights do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.device_document import Group
from specmeter.analysis.device_join import Joined
from specmeter.analysis.kernel_classes import CLASSES
from specmeter.analysis.verify_sides import side_of
from specmeter.trace.deep_requests import context_tokens

FEW = 5  # cycles of a side, below which a length has no row
_ATTENTION = CLASSES.index("attention")
Found = NDArray[np.float64]


def mean_context(joined: Joined, group: Group) -> float | None:
    """Mean tokens of context a sequence over a group's cycles; None where no request of the window is known."""
    lengths = _lengths(joined)[group.cycles]
    known = lengths[np.isfinite(lengths)]
    return float(known.mean()) if len(known) else None


def context_rows(verify: tuple[Joined, Group], plain: tuple[Joined, Group]) -> list[dict[str, Any]]:
    """A row a length of context that both sides have ``FEW`` cycles of: lengths from a power of two to the next."""
    sides = [(joined, group, _bucket(_lengths(joined))) for joined, group in (verify, plain)]
    both = sorted(set.intersection(*(set(bucket[group.cycles].tolist()) for _, group, bucket in sides)) - {-1})
    rows = []
    for number in both:
        ours, theirs = (
            (joined, replace(group, cycles=group.cycles & (bucket == number))) for joined, group, bucket in sides
        )
        if min(ours[1].count, theirs[1].count) < FEW:
            continue
        one, other = side_of(*ours), side_of(*theirs)
        rows.append(
            {
                "from_tokens": 1 << number, "to_tokens": (2 << number) - 1,
                "verify_cycles": one.cycles, "plain_cycles": other.cycles,
                "verify_ms": one.span_ms, "plain_ms": other.span_ms,
                "factor": one.span_ms / other.span_ms if other.span_ms else None,
                "verify_attention_ms": one.ms[_ATTENTION], "plain_attention_ms": other.ms[_ATTENTION],
            }
        )  # fmt: skip
    return rows


def context_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on how the factor goes with the context; empty for a single length."""
    if len(rows) < 2:
        return ""
    parts = (
        f"{row['from_tokens']} to {row['to_tokens']} tokens {row['factor']:.2f} x (attention "
        f"{row['verify_attention_ms']:.3f} against {row['plain_attention_ms']:.3f} ms)"
        for row in rows if row["factor"] is not None
    )  # fmt: skip
    return f" By the context's length: {', '.join(parts)}."


def _lengths(joined: Joined) -> Found:
    return context_tokens(joined.window.requests, joined.rank.cycles.t0_ns)


def _bucket(lengths: Found) -> NDArray[np.int64]:
    """The power of two below each length; -1 where it is not known."""
    known = np.isfinite(lengths)
    found = np.full(len(lengths), -1, np.int64)
    found[known] = np.floor(np.log2(np.maximum(lengths[known], 1.0))).astype(np.int64)
    return found
