"""Verify against one plain decode step of the same server, class by class: what grows with the width, and why.

A verify forward runs the target over several tokens a sequence, a plain step over one. At small batches both read all
dense weights once, so GEMMs should cost the same; attention reads the context once for either; a mixture of experts
reads more experts for more tokens; launches are the same in number. What takes longer than that says is what to look
at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specmeter.analysis.costmodel_bytes import Read, Shape, forward_bytes
from specmeter.analysis.device_document import Group, cycle_groups, kernels_of, phase_numbers
from specmeter.analysis.device_join import Joined, Mask, chosen_cycles, join
from specmeter.analysis.kernel_classes import CLASSES, COLLECTIVES, GEMM, LM_HEAD, PROBE, Patterns
from specmeter.analysis.moe import Experts, distinct_experts
from specmeter.trace.build import Trace
from specmeter.trace.deep import DeepWindow
from specmeter.trace.plan import PHASES

# A class whose time changes by less than this factor does not grow with the width.
FLAT = 1.1
# Kernels shorter than this are bound by their own start and end, not by bytes or arithmetic.
TINY_US = 5.0


@dataclass(frozen=True)
class Server:
    """What is known of the model and the card, for the reasons; all optional.

    ``shape`` from the model's config (costmodel_bytes), ``gb_s`` the memory's bandwidth in GB/s (10^9 bytes) of all
    ranks together, ``context`` tokens of cache a sequence, ``measured_experts`` distinct experts a layer that a verify
    and a plain step really touched.
    """

    shape: Shape | None = None
    gb_s: float | None = None
    context: float | None = None
    measured_experts: tuple[float, float] | None = None


@dataclass(frozen=True)
class Side:
    """One forward of the target: mean ms and kernels by class (CLASSES), over ``cycles`` cycles of ``batch`` requests.

    ``tokens`` a sequence, ``span_ms`` from the first kernel to the last one, ``busy_ms`` of it. -1: not known.
    """

    ms: tuple[float, ...]
    kernels: tuple[float, ...]
    tokens: float
    batch: int
    cycles: int
    span_ms: float
    busy_ms: float
    graph: bool

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
    begin, end = np.zeros(0), np.zeros(0)
    if len(at):
        _, where = np.unique(joined.cycle[at], return_inverse=True)
        begin = np.full(int(where.max()) + 1, np.inf)
        end = np.zeros(len(begin))
        np.minimum.at(begin, where, joined.t0[at])
        np.maximum.at(end, where, joined.end[at])
    span = float((end - begin).mean()) / 1e6 if len(begin) else 0.0
    ms = tuple((ns / 1e6).tolist())
    tokens = _tokens(joined, group)
    return Side(ms, tuple(kernels.tolist()), tokens, group.batch, count, span, sum(ms), group.graph)


def _tokens(joined: Joined, group: Group) -> float:
    """Tokens a sequence in the forward: the drafts and the one before them; 1 in a plain step; -1 not known."""
    if group.plain:
        return 1.0
    drafted = joined.rank.cycles.drafted[group.cycles]
    if bool((drafted > 0).all()):
        return float(drafted.mean()) / max(group.batch, 1) + 1
    # A chain drafts one token a step; a tree's size is not told by its steps.
    return group.steps + 1.0 if group.steps > 0 else -1.0


def compare(verify: Side, plain: Side, server: Server | None = None) -> dict[str, Any]:
    """``document["verify_width"]``: the two sides, a row a class with time, kernels, difference, factor and reason."""
    server = server or Server()
    rows = []
    for code, name in enumerate(CLASSES):
        ours, theirs = verify.ms[code], plain.ms[code]
        if ours or theirs:
            row = {"class": name, "verify_ms": ours, "plain_ms": theirs, "more_ms": ours - theirs}
            row |= {"factor": ours / theirs if theirs else None}
            row |= {"verify_kernels": verify.kernels[code], "plain_kernels": plain.kernels[code]}
            rows.append({**row, "reason": _reason(code, verify, plain, server)})
    idle = {
        f"{name}_ms": max(0.0, side.span_ms - side.busy_ms) for name, side in (("verify", verify), ("plain", plain))
    }
    more = verify.span_ms - plain.span_ms
    document = {
        "verify": verify.facts(),
        "plain": plain.facts(),
        "classes": sorted(rows, key=lambda row: -abs(row["more_ms"])),
        "idle": {**idle, "more_ms": idle["verify_ms"] - idle["plain_ms"]},
        "more_ms": more,
        "factor": verify.span_ms / plain.span_ms if plain.span_ms else None,
        "bytes": _bytes(verify, plain, server),
        "experts": _experts(verify, plain, server),
        "reason": "",
    }
    document["sentence"] = _sentence(document)
    return document


def verify_width(
    trace: Trace,
    windows: Sequence[DeepWindow],
    plain: tuple[Trace, Sequence[DeepWindow]] | None = None,
    server: Server | None = None,
    requests: Mask | None = None,
    patterns: Patterns | None = None,
) -> dict[str, Any]:
    """The comparison for the lowest rank. ``plain`` is the trace and windows of the same server without speculation;
    None takes plain steps of the same window. Where a side is missing all is null but ``reason``."""
    mine = _lowest(trace, windows, patterns)
    if mine is None or mine.window.on_cpu:
        return _nothing("no window of a device was recorded" if mine is None else "the window was recorded on a CPU")
    groups = cycle_groups(mine, chosen_cycles(mine, requests))
    ours = next((group for group in groups if not group.plain), None)
    if ours is None:
        return _nothing("the window holds no cycle with drafts")
    # Plain steps of the same process run under requests of their own, which the choice of requests leaves out.
    other = _lowest(*plain, patterns) if plain else mine
    found = [group for group in cycle_groups(other, chosen_cycles(other)) if group.plain or plain] if other else []
    alike = [group for group in found if group.batch == ours.batch] or found
    if other is None or not alike:
        return _nothing("no window of plain decoding was recorded")
    side = side_of(other, Group(True, alike[0].batch, 0, alike[0].graph, alike[0].cycles))
    return compare(side_of(mine, ours), side, server)


def _lowest(trace: Trace, windows: Sequence[DeepWindow], patterns: Patterns | None) -> Joined | None:
    ordered = sorted(windows, key=lambda w: (w.rank < 0, w.rank))
    found = (join(trace, window, patterns) for window in ordered)
    return next((joined for joined in found if joined is not None), None)


def _nothing(reason: str) -> dict[str, Any]:
    names = ("verify", "plain", "idle", "more_ms", "factor", "bytes", "experts")
    return {**dict.fromkeys(names), "classes": [], "reason": reason, "sentence": f"Not compared: {reason}."}


def _bytes(verify: Side, plain: Side, server: Server) -> dict[str, Any] | None:
    """Bytes each side reads at least, and the ms that takes; None without the model's shape or the tokens."""
    if server.shape is None or verify.tokens < 0:
        return None
    found: dict[str, Any] = {"context_tokens": server.context, "bandwidth_gb_s": server.gb_s}
    for name, side in (("verify", verify), ("plain", plain)):
        read = _read(side, server)
        assert read is not None
        found[name] = {**asdict(read), "total": read.total, "ms": _floor_ms(read.total, server)}
    return found


def _read(side: Side, server: Server) -> Read | None:
    if server.shape is None or side.tokens < 0:
        return None
    return forward_bytes(server.shape, round(side.tokens), server.context or 0.0, float(max(side.batch, 1)))


def _floor_ms(size: float, server: Server) -> float | None:
    return size / (server.gb_s * 1e6) if server.gb_s else None


def _experts(verify: Side, plain: Side, server: Server) -> dict[str, Any] | None:
    """Distinct experts a layer on either side: expected, and measured where given; None for a dense model."""
    shape = server.shape
    if shape is None or shape.experts is None or verify.tokens < 0:
        return None
    expected = [_distinct(shape.experts, side) for side in (verify, plain)]
    measured = server.measured_experts
    return {
        "total": shape.experts.total,
        "per_token": shape.experts.per_token,
        "expected": {"verify": expected[0], "plain": expected[1], "factor": expected[0] / expected[1]},
        "measured": {"verify": measured[0], "plain": measured[1], "factor": measured[0] / measured[1]}
        if measured
        else None,
    }


def _distinct(experts: Experts, side: Side) -> float:
    return distinct_experts(experts, side.tokens * max(side.batch, 1))


def _reason(code: int, verify: Side, plain: Side, server: Server) -> str:
    """Why a class costs what it does, in one line, from the numbers at hand."""
    name, ours, theirs = CLASSES[code], verify.ms[code], plain.ms[code]
    if not theirs:
        return "plain decoding has no such kernels"
    if not ours:
        return "verify has no such kernels"
    parts = []
    if code in (GEMM, LM_HEAD):
        parts.append(
            _weights(verify, plain, server) if code == GEMM else _flat("its weights are read once", ours, theirs)
        )
    elif name == "attention":
        parts.append(_attention(verify, plain, server))
    elif name == "experts":
        parts.append(_expert_words(verify, plain, server))
    elif code == COLLECTIVES:
        parts.append(f"messages grow with the tokens, {_times(verify.tokens, plain.tokens)}; a part may be waiting")
    parts.append(_launches(code, verify, plain))
    return "; ".join(part for part in parts if part)


def _weights(verify: Side, plain: Side, server: Server) -> str:
    read = _read(verify, server)
    words = _flat("weights are read once whatever the width", verify.ms[GEMM], plain.ms[GEMM])
    if read is None:
        return words
    least = _floor_ms(read.weights, server)
    both = verify.ms[GEMM] + verify.ms[LM_HEAD]
    if least is None:
        return f"{words}; {read.weights / 1e9:.2f} GB with lm_head"
    return f"{words}; {read.weights / 1e9:.2f} GB with lm_head take {least:.3f} ms at least, both classes {both:.3f} ms"


def _flat(why: str, ours: float, theirs: float) -> str:
    if ours / theirs < FLAT:
        return f"{why}: no growth, as it should be"
    return f"{why}, so a factor of {ours / theirs:.2f} is another kernel, padding or arithmetic"


def _attention(verify: Side, plain: Side, server: Server) -> str:
    words = "the context is read once a sequence, whatever the width"
    read = _read(verify, server)
    if read is None or not server.context:
        return words
    least = _floor_ms(read.kv, server)
    return f"{words}: {read.kv / 1e6:.1f} MB" + (f", {least:.4f} ms at least" if least is not None else "")


def _expert_words(verify: Side, plain: Side, server: Server) -> str:
    found = _experts(verify, plain, server)
    if found is None:
        return "more tokens touch more experts"
    expected, measured = found["expected"], found["measured"]
    words = (
        f"{expected['verify']:.0f} distinct experts a layer against {expected['plain']:.0f} are expected, "
        f"x {expected['factor']:.2f}"
    )
    return words + (
        f"; measured {measured['verify']:.0f} against {measured['plain']:.0f}, x {measured['factor']:.2f}"
        if measured else ""
    )  # fmt: skip


def _times(ours: float, theirs: float) -> str:
    return f"x {ours / theirs:.2f}" if ours > 0 and theirs > 0 else "by how much is not known"


def _launches(code: int, verify: Side, plain: Side) -> str:
    """What the number of kernels says: one more each costs its start, and tiny ones cost nothing but that."""
    ours, theirs = verify.kernels[code], plain.kernels[code]
    each = 1e3 * verify.ms[code] / ours
    tiny = f"; {each:.1f} us each, so their number counts and not the width" if each < TINY_US else ""
    if abs(ours - theirs) < 0.5:
        return f"as many kernels ({ours:.0f}){tiny}"
    return f"{ours:.0f} kernels against {theirs:.0f}{tiny}"


def _sentence(document: dict[str, Any]) -> str:
    verify, plain, factor = document["verify"], document["plain"], document["factor"]
    tokens = f"{verify['tokens']:.3g} tokens" if verify["tokens"] is not None else "an unknown number of tokens"
    if factor is None:
        return "Not compared: the plain step has no kernels in a point of phase verify."
    most = [row for row in document["classes"] if row["more_ms"] > 0][:2]
    named = [*((row["class"], row["more_ms"]) for row in most), ("idle", document["idle"]["more_ms"])]
    named = sorted((pair for pair in named if pair[1] > 0), key=lambda pair: -pair[1])[:2]
    where = " and ".join(f"{name} (+{ms:.3f} ms)" for name, ms in named)
    return (
        f"Verify of {tokens} takes {verify['span_ms']:.3f} ms on the device, {factor:.2f} x a plain step's "
        f"{plain['span_ms']:.3f} ms" + (f": {where}." if where else ".")
    )
