"""One forward of the target on the device, and what is known of the server that ran it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specmeter.analysis.costmodel_bytes import Shape
from specmeter.analysis.device_document import Group, kernels_of, phase_numbers
from specmeter.analysis.device_join import Joined
from specmeter.analysis.intervals import Ints, spans_of
from specmeter.analysis.kernel_classes import CLASSES, PROBE
from specmeter.trace.plan import PHASES


@dataclass(frozen=True)
class Server:
    """What is known of the model and the card, for the reasons; all optional.

    ``shape`` from the model's config (costmodel_bytes), ``gb_s`` the memory's bandwidth in GB/s (10^9 bytes) of all
    ranks together (None: the cards' peaks, where they are known), ``context`` tokens of cache a sequence,
    ``measured_experts`` distinct experts a layer that a verify and a plain step really touched.
    """

    shape: Shape | None = None
    gb_s: float | None = None
    context: float | None = None
    measured_experts: tuple[float, float] | None = None


@dataclass(frozen=True)
class Side:
    """One forward of the target: mean ms and kernels by class (CLASSES), over ``cycles`` cycles of ``batch`` requests.

    ``tokens`` a sequence, ``span_ms`` from the first kernel to the last one (``spans_ms``: of each cycle), ``busy_ms``
    of it. -1: not known. ``names``: by class, the kernels that take most of its time, shortened, the largest first.
    """

    ms: tuple[float, ...]
    kernels: tuple[float, ...]
    tokens: float
    batch: int
    cycles: int
    span_ms: float
    busy_ms: float
    graph: bool
    spans_ms: tuple[float, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()

    def facts(self) -> dict[str, Any]:
        """The side as the document has it."""
        known = {"tokens": self.tokens, "batch": self.batch}
        return {
            **{name: value if value >= 0 else None for name, value in known.items()},
            "cycles": self.cycles, "span_ms": self.span_ms, "busy_ms": self.busy_ms, "graph": self.graph,
        }  # fmt: skip


def side_of(joined: Joined, group: Group) -> Side:
    """The verify forward of a group of cycles: the kernels that the points of phase verify launched."""
    at = kernels_of(joined, group.cycles)
    at = at[(phase_numbers(joined, at) == PHASES.index("verify")) & (joined.kind[at] != PROBE)]
    count = group.count
    ns = np.bincount(joined.kind[at], weights=joined.added[at], minlength=len(CLASSES)) / count
    kernels = np.bincount(joined.kind[at], minlength=len(CLASSES)) / count
    _, where = np.unique(joined.cycle[at], return_inverse=True)
    begin, end = spans_of(joined.t0[at], joined.end[at], where, int(where.max(initial=-1)) + 1)
    spans = (end - begin) / 1e6
    ms = tuple((ns / 1e6).tolist())
    mean = float(spans.mean()) if len(spans) else 0.0
    return Side(
        ms, tuple(kernels.tolist()), _tokens(joined, group), group.batch, count, mean, sum(ms), group.graph,
        tuple(spans.tolist()), tuple(_names(joined, at, code) for code in range(len(CLASSES))),
    )  # fmt: skip


def _names(joined: Joined, at: Ints, code: int) -> tuple[str, ...]:
    """The names of a class's kernels by time, until 90 % of it is named, without their template and type arguments."""
    mine = at[joined.kind[at] == code]
    names = joined.window.kernels["name"][mine]
    ns = np.bincount(names, weights=joined.added[mine]) if len(mine) else np.zeros(0)
    order = np.argsort(-ns, kind="stable")
    needed = int(np.searchsorted(np.cumsum(ns[order]), 0.9 * ns.sum())) + 1
    return tuple(dict.fromkeys(short_name(joined.window.names[name]) for name in order[:needed] if ns[name] > 0))


def short_name(name: str) -> str:
    """``void a::(anonymous namespace)::b<8u>(int*)`` as ``b``."""
    words = name.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
    return words.split("::")[-1].split()[-1] if words.split("::")[-1].split() else name


def _tokens(joined: Joined, group: Group) -> float:
    """Tokens a sequence in the forward: the drafts and the one before them; 1 in a plain step; -1 not known."""
    if group.plain:
        return 1.0
    drafted = joined.rank.cycles.drafted[group.cycles]
    if bool((drafted > 0).all()):
        return float(drafted.mean()) / max(group.batch, 1) + 1
    # A chain drafts one token a step; a tree's size is not told by its steps.
    return group.steps + 1.0 if group.steps > 0 else -1.0
