"""Verify against one plain decode step of the same server, class by class: what grows with the width, and why.

A verify forward runs the target over several tokens a sequence, a plain step over one. At small batches both read all
dense weights once, so GEMMs should cost the same; attention reads the context once for either; a mixture of experts
reads more experts for more tokens; launches are the same in number. What takes longer than that says is what to look
at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specmeter.analysis.card_bandwidth import peak_gb_s
from specmeter.analysis.device_document import Group, cycle_groups
from specmeter.analysis.device_join import Joined, Mask, chosen_cycles, join
from specmeter.analysis.kernel_classes import CLASSES, Patterns
from specmeter.analysis.stats import ratio_interval
from specmeter.analysis.verify_context import context_rows, context_words, mean_context
from specmeter.analysis.verify_reasons import bytes_facts, expert_facts, reason_of
from specmeter.analysis.verify_sides import Server, Side, side_of
from specmeter.trace.build import Trace
from specmeter.trace.deep import DeepWindow

__all__ = ["Server", "compare", "verify_width"]

# From this ratio (its lower end) of cycles under the profiler to those beside them, idle time is the profiler's doing.
SLOWED = 1.05


def compare(verify: Side, plain: Side, server: Server | None = None, on_cpu: bool = False) -> dict[str, Any]:
    """``document["verify_width"]``: the two sides, a row a class with time, kernels, difference, factor and reason."""
    server = server or Server()
    rows: list[dict[str, Any]] = []
    for code, name in enumerate(CLASSES):
        ours, theirs = verify.ms[code], plain.ms[code]
        if ours or theirs:
            row: dict[str, Any] = {"class": name, "verify_ms": ours, "plain_ms": theirs, "more_ms": ours - theirs}
            row |= {"factor": ours / theirs if theirs else None}
            row |= {"verify_kernels": verify.kernels[code], "plain_kernels": plain.kernels[code]}
            rows.append({**row, "reason": reason_of(code, verify, plain, server)})
    idle = {
        f"{name}_ms": max(0.0, side.span_ms - side.busy_ms) for name, side in (("verify", verify), ("plain", plain))
    }
    more, factor = verify.span_ms - plain.span_ms, _factor(verify, plain)
    document: dict[str, Any] = {
        "on_cpu": on_cpu,
        "verify": verify.facts(),
        "plain": plain.facts(),
        "classes": sorted(rows, key=lambda row: -abs(row["more_ms"])),
        "idle": {**idle, "more_ms": idle["verify_ms"] - idle["plain_ms"]},
        "more_ms": more,
        "factor": factor["point"] if factor else None,
        "factor_interval": factor,
        "bytes": bytes_facts(verify, plain, server),
        "experts": expert_facts(verify, plain, server),
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
    """The comparison for the lowest rank and the first setting; ``others`` are the same for the other settings.

    ``plain`` is the trace and windows of the same server without speculation; None takes plain steps of the same
    window. Where a side is missing all is null but ``reason``.
    """
    plains = _lowest(*plain, patterns) if plain else {}
    documents = []
    for setting, mine in _lowest(trace, windows, patterns).items():
        alike = [window for window in windows if window.setting == setting]
        known = _with_bandwidth(server or Server(), alike)
        documents.append({"setting": setting, **_compared(mine, plains.values(), known, requests)})
    if not documents:
        return {"setting": "", **_nothing("no window was recorded of a process that the trace holds"), "others": []}
    return {**documents[0], "others": documents[1:]}


def _compared(mine: Joined, plains: Iterable[Joined], server: Server, requests: Mask | None) -> dict[str, Any]:
    groups = cycle_groups(mine, chosen_cycles(mine, requests))
    ours = next((group for group in groups if not group.plain), None)
    if ours is None:
        return _nothing("the window holds no cycle with drafts")
    found = [(other, group) for other in plains for group in cycle_groups(other, chosen_cycles(other))]
    # Plain steps of the same process run under requests of their own, which the choice of requests leaves out.
    found = found or [(mine, group) for group in cycle_groups(mine, chosen_cycles(mine)) if group.plain]
    if not found:
        return _nothing("no window of plain decoding was recorded")
    other, group = next((pair for pair in found if pair[1].batch == ours.batch), found[0])
    group = Group(True, group.batch, 0, group.graph, group.cycles)
    context = mean_context(mine, ours)
    server = server if context is None else replace(server, context=context)
    document = compare(side_of(mine, ours), side_of(other, group), server, mine.window.on_cpu)
    rows = context_rows((mine, ours), (other, group))
    told = {"verify": context, "plain": mean_context(other, group)}
    words = document["sentence"] + _slowed(document, mine.window.cost) + context_words(rows)
    return document | {"context_tokens": told, "contexts": rows, "sentence": words}


def _slowed(document: dict[str, Any], cost: Mapping[str, Any]) -> str:
    """What to make of idle time in a window that the profiler made slower: busy time alone; empty where it did not."""
    ratio, (verify, plain) = cost.get("ratio") or {}, (document["verify"], document["plain"])
    if (ratio.get("low") or 0.0) < SLOWED or not plain["busy_ms"]:
        return ""
    return (
        f" The profiler made this window's cycles {ratio['point']:.2f} x as long, so its idle time is not the server's "
        f"own: busy, verify takes {verify['busy_ms'] / plain['busy_ms']:.2f} x a plain step."
    )


def _with_bandwidth(server: Server, windows: Sequence[DeepWindow]) -> Server:
    """The server with the peaks of all ranks' cards, where no bandwidth was given and every card is known."""
    peaks = [peak_gb_s(window.device) for window in windows]
    known = [peak for peak in peaks if peak is not None]
    if server.gb_s is not None or not known or len(known) < len(peaks):
        return server
    return replace(server, gb_s=sum(known))


def _lowest(trace: Trace, windows: Sequence[DeepWindow], patterns: Patterns | None) -> dict[str, Joined]:
    """The lowest rank's window of each setting, in the order of the windows."""
    found: dict[str, Joined] = {}
    for window in sorted(windows, key=lambda w: (w.rank < 0, w.rank)):
        joined = join(trace, window, patterns) if window.setting not in found else None
        if joined is not None:
            found[window.setting] = joined
    return {window.setting: found[window.setting] for window in windows if window.setting in found}


def _nothing(reason: str) -> dict[str, Any]:
    names = ("verify", "plain", "idle", "more_ms", "factor", "factor_interval", "bytes", "experts", "context_tokens")
    return {
        **dict.fromkeys(names),
        "on_cpu": False,
        "classes": [],
        "contexts": [],
        "reason": reason,
        "sentence": f"Not compared: {reason}.",
    }


def _factor(verify: Side, plain: Side) -> dict[str, Any] | None:
    """The ratio of the two spans' geometric means over cycles, with its interval; None without spans."""
    if not verify.spans_ms or not plain.spans_ms or min(*verify.spans_ms, *plain.spans_ms) <= 0:
        return None
    return ratio_interval(verify.spans_ms, plain.spans_ms, "cycle").as_json()


def _sentence(document: dict[str, Any]) -> str:
    verify, plain, factor = document["verify"], document["plain"], document["factor"]
    place = "in operators of the host" if document["on_cpu"] else "on the device"
    tokens = f"{verify['tokens']:.3g} tokens" if verify["tokens"] is not None else "an unknown number of tokens"
    if factor is None:
        return "Not compared: the plain step has no kernels in a point of phase verify."
    most = [row for row in document["classes"] if row["more_ms"] > 0][:2]
    named = [*((row["class"], row["more_ms"]) for row in most), ("idle", document["idle"]["more_ms"])]
    named = sorted((pair for pair in named if pair[1] > 0), key=lambda pair: -pair[1])[:2]
    where = " and ".join(f"{name} (+{ms:.3f} ms)" for name, ms in named)
    return (
        f"Verify of {tokens} takes {verify['span_ms']:.3f} ms {place}, {factor:.2f} x{_ends(document)} a plain step's "
        f"{plain['span_ms']:.3f} ms" + (f": {where}." if where else ".")
    )


def _ends(document: dict[str, Any]) -> str:
    """Empty where an end is infinite, as after one cycle."""
    found = document["factor_interval"]
    known = found is not None and found["low"] is not None and found["high"] is not None
    return f" [{found['low']:.2f}, {found['high']:.2f}]" if known else ""
