"""What a report says of a run whose cycles were sampled under a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmeter.reporters.inert import inert
from specmeter.reporters.numbers import plus_minus

_NUMBERS = {
    "iteration": "by the engine's own forward counter, the same cycles on every rank",
    "cycle": "by each process's own count of cycles: ranks may differ",
    "clock": "by the host's clock in slots of 134 ms, in which all of its processes are alike",
}
_ANY = float("-inf")
FEW = 60


def sampling_lines(found: Mapping[str, Any] | None) -> list[str]:
    """The lines for ``document["sampling"]``, none where there is none; text in them is inert already."""
    if not found:
        return []
    counter = str(found["counter"])
    lines = [
        f"Sampling: {found['share_percent']:.1f} % of the cycles had every probe ({found['sampled']} sampled, "
        f"{found['clean']} clean, {found['mixtures']} left out as a mixture), drawn at random "
        f"{_NUMBERS.get(counter, inert(counter, 60))}; budget {found['budget_percent']:g} %"
    ]
    lines.append(_cost(found))
    if found["sampled"] < FEW:
        lines.append("Few cycles were sampled, so the phases are uncertain: send more requests, or allow more")
    if found["endless"]:
        names = ", ".join(inert(name, 80) for name in found["endless"][:5])
        lines.append(f"Kept their probes in clean cycles too, as a frame of theirs never returned: {names}")
    stamps = found["stamps"]
    if stamps["percent"] is None:
        lines.append(inert(stamps["reason"], 160))
    else:
        lines.append(_stamps(stamps))
    return lines


def _stamps(found: Mapping[str, Any]) -> str:
    return (
        f"Stamps in graphs: {found['a_cycle']:.1f} a cycle, each {found['stamp_us']:.2f} us of the device (a stamped "
        f"graph against a clean one), so {found['percent']:.2f} % of a cycle, at most {found['upper_percent']:.2f} %"
    )


def _cost(found: Mapping[str, Any]) -> str:
    sampled, clean, cost = found["sampled_ms"], found["clean_ms"], found["sample_cost_percent"]
    if sampled is None or clean is None or cost is None:
        return f"What sampling cost is not known, as too few cycles ran; {inert(found['why'], 200)}"
    overall, alone = found["overall_percent"], found["point_percent"]
    point = f", {alone:.3f} % of it the cycle point of every cycle" if alone is not None else ""
    return (
        f"A sampled cycle takes {sampled['point']:.3f} ms{plus_minus(sampled)}, a clean one {clean['point']:.3f} ms"
        f"{plus_minus(clean)}: {cost['point']:.2f} %{plus_minus(cost, 2, _ANY)} a sampled cycle, code in and out "
        f"({found['change_us']:.0f} us each) included, and {overall['point']:.3f} %{plus_minus(overall, 3, _ANY)} "
        f"of the run{point}"
    )
