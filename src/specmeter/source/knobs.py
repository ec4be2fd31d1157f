"""Knobs: numbers of the engine that may be changed while it runs, and whether this version has what they stand for.

Runs under the server's own interpreter (standard library of CPython 3.9).
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import versions
from .anchors import Refusal, Resolver

Plain = Dict[str, Any]
_COPIED = ("name", "about", "point", "path", "shape", "low", "most", "among", "alone", "hint")


def resolve_knobs(
    knobs: Sequence[Mapping[str, Any]], points: Sequence[Plain], resolver: Resolver, version: str
) -> Tuple[List[Plain], List[Plain]]:
    """The knobs of this version and those refused: ``([{..., "points": [ids]}], [{"name", "reason", ...}])``.

    A knob needs its point, whose frame leads to the number, and every place under ``needs`` that is for this version:
    these are the reads that make the number mean what the recipe says.
    """
    found: List[Plain] = []
    refused: List[Plain] = []
    for knob in knobs:
        sites = [point["id"] for point in points if point["name"] == knob["point"]]
        missing = _missing(knob, resolver, version)
        if missing is None and not sites:
            missing = Refusal(f"its point {knob['point']} is not there", knob["point"])
        if missing is not None:
            refused.append(_refused(knob, missing))
            continue
        found.append({**{key: knob.get(key) for key in _COPIED}, "points": sites})
    return found, refused


def open_knobs(knobs: Sequence[Plain], points: Sequence[Plain], names: Sequence[str]) -> None:
    """Have the points of the knobs called ``names`` hand over what leads to them; the others stay as they are."""
    for knob in knobs:
        knob["open"] = knob["name"] in names
        for point in points if knob["open"] else ():
            if point["id"] in knob["points"]:
                numbers = [knob["most"], knob["among"], *(knob["alone"] or [])]
                paths = [knob["path"], *(path for path in numbers if isinstance(path, str))]
                point["knob_paths"] = [*point.get("knob_paths", []), *paths]


def drop_lost(knobs: List[Plain], refused: List[Plain], points: Sequence[Plain]) -> None:
    """Once the rewriter has refused points: a knob that has none left is refused too."""
    left = {point["id"] for point in points}
    for knob in list(knobs):
        knob["points"] = [id for id in knob["points"] if id in left]
        if not knob["points"]:
            knobs.remove(knob)
            reason = f"its point {knob['point']} cannot carry a probe"
            refused.append(_refused(knob, Refusal(reason, knob["point"])))


def _refused(knob: Mapping[str, Any], why: Refusal) -> Plain:
    words = {"reason": why.reason, "reached": why.reached, "nearest": list(why.nearest)}
    return {"name": knob["name"], "about": knob.get("about", ""), **words}


def _missing(knob: Mapping[str, Any], resolver: Resolver, version: str) -> Optional[Refusal]:
    if not versions.in_range(version, knob.get("range", "")):
        return Refusal(f"it is not for version {version} ({knob['range']})", "range")
    for anchor in knob["needs"]:
        if not versions.in_range(version, anchor.get("range", "")):
            continue
        outcome = resolver.resolve(anchor, "call")
        if isinstance(outcome, Refusal):
            return outcome
    return None
