"""What a recipe may say, checked key by key. A recipe is data: nothing in it is executed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from specmeter.source import versions
from specmeter.source.anchors import INSIDE

PHASES = ("draft", "verify", "accept", "extend", "kv", "schedule", "wait", "other")
ROLES = ("cycle", "leaf", "span", "mark", "wait", "overlapped")
KINDS = ("call", "body")
CLOCKS = ("host", "device")
STEPS = ("loop", "none")
SHAPES = ("each", "int")
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*$")
_QUALNAME = re.compile(r"[^\W\d]\w*(\.(<locals>|[^\W\d]\w*))*$")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*$")
_VALUE = re.compile(r"""(return|self|arg\d+|kw\.[^\W\d]\w*)(\.[^\W\d]\w*|\[\d+\]|\["[^"\]]*"\])*(\|(len|sum))?$""")
_PLACE = re.compile(r"(self|arg\d+|kw\.[^\W\d]\w*)(\.[^\W\d]\w*|\[\d+\])*\.[^\W\d]\w*$")
_PLACE_HINT = "a knob's path is self|argN|kw.NAME, then .attr or [N], and ends in .attr; no calls, no filters"
_PATH_HINT = 'a path is self|argN|kw.NAME|return, then .attr, [N] or ["key"], and may end in |len or |sum; no calls'

_RECIPE = {"schema", "engine", "about", "modes", "versions", "runner", "point", "knob"}
_MODES = ("decode", "prefill", "mixed")
_VERSIONS = {"dist", "range"}
_RUNNER = {"name", "range", "about"}
_POINT = {"name", "role", "kind", "clock", "required", "step", "stamp", "runner", "range", "about", "anchors", "values"}
_KNOB = {"name", "about", "point", "path", "shape", "low", "most", "among", "alone", "hint", "range", "needs"}
_ANCHOR = {"range", "module", "function", "call", "inside", "args", "sites"}


class _Problems:
    """Collects what is wrong, each with the place it is in."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, where: str, what: str) -> None:
        self.found.append((where, what))

    def keys(self, where: str, item: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
        for key in item.keys() - known:
            near = difflib.get_close_matches(key, known, 1)
            self.add(where, f"unknown key {key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        for key in sorted(needed - item.keys()):
            self.add(where, f"key {key!r} is missing")

    def one_of(self, where: str, item: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> None:
        if key in item and item[key] not in allowed:
            self.add(where, f"{key} = {item[key]!r} is none of {', '.join(allowed)}")

    def matches(self, where: str, item: Mapping[str, Any], key: str, pattern: re.Pattern[str]) -> None:
        if key in item and not (isinstance(item[key], str) and pattern.match(item[key])):
            self.add(where, f"{key} = {item[key]!r} is not well formed")

    def range(self, where: str, item: Mapping[str, Any]) -> None:
        spec = item.get("range", "")
        problem = versions.check_range(spec) if isinstance(spec, str) else f"{spec!r} is not text"
        if problem:
            self.add(where, f"range: {problem}")

    def regex(self, where: str, item: Mapping[str, Any], key: str) -> None:
        if key not in item:
            return
        try:
            re.compile(item[key])
        except (re.error, TypeError) as error:
            self.add(where, f"{key} = {item[key]!r} is not a regular expression: {error}")


def problems(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything wrong with a recipe read from TOML: ``[(place, what)]``, empty when it is valid.

    A place is ``recipe``, ``versions N``, ``runner N`` or ``point N (NAME)``, then the anchor's number.
    """
    found = _Problems()
    found.keys("recipe", recipe, _RECIPE, {"schema", "engine", "versions", "point"})
    if recipe.get("schema", 1) != 1:
        found.add("recipe", f"schema = {recipe['schema']!r}: this specmeter reads schema 1")
    found.matches("recipe", recipe, "engine", re.compile(r"[a-z][a-z0-9_-]*$"))
    for number, entry in enumerate(_tables(found, "recipe", recipe, "versions"), 1):
        where = f"versions {number}"
        found.keys(where, entry, _VERSIONS, _VERSIONS)
        found.range(where, entry)
        dists = entry.get("dist", ["x"])
        if not isinstance(dists, list) or not dists or not all(isinstance(name, str) and name for name in dists):
            found.add(where, "dist is a list of distribution names")
    runners = _tables(found, "recipe", recipe, "runner")
    for number, runner in enumerate(runners, 1):
        found.keys(f"runner {number}", runner, _RUNNER, {"name"})
        found.range(f"runner {number}", runner)
    names = tuple(str(runner.get("name")) for runner in runners)
    points = _tables(found, "recipe", recipe, "point")
    for number, point in enumerate(points, 1):
        _check_point(found, f"point {number} ({point.get('name', 'no name')})", point, names)
    _check_names(found, points)
    for number, knob in enumerate(_tables(found, "recipe", recipe, "knob"), 1):
        _check_knob(found, f"knob {number} ({knob.get('name', 'no name')})", knob, points)
    _check_modes(found, recipe.get("modes", {}))
    if points and not any(point.get("role") == "cycle" for point in points):
        found.add("recipe", "no point has role = 'cycle', so records could not be divided into cycles")
    return found.found


def _tables(found: _Problems, where: str, item: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = item.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        found.add(where, f"{key} is a list of tables")
        return []
    if not value and key in ("versions", "point") and key in item:
        found.add(where, f"{key} is empty")
    return value


def _check_names(found: _Problems, points: list[Mapping[str, Any]]) -> None:
    roles: dict[object, object] = {}
    for number, point in enumerate(points, 1):
        name, role = point.get("name"), point.get("role")
        if isinstance(name, str) and isinstance(role, str) and roles.setdefault(name, role) != role:
            found.add(
                f"point {number} ({name})", f"role = {role!r}, but an earlier point of that name is {roles[name]!r}"
            )


def _check_modes(found: _Problems, modes: object) -> None:
    fits = isinstance(modes, dict) and all(
        key in _MODES and isinstance(numbers, list) and all(type(number) is int for number in numbers)
        for key, numbers in modes.items()
    )
    if not fits:
        found.add("recipe", f"modes is a table of lists of numbers for {', '.join(_MODES)}")


def _check_point(found: _Problems, where: str, point: Mapping[str, Any], runners: tuple[str, ...]) -> None:
    found.keys(where, point, _POINT, {"name", "role", "kind", "clock", "required", "anchors"})
    found.matches(where, point, "name", _NAME)
    for key, allowed in (("role", ROLES), ("kind", KINDS), ("clock", CLOCKS), ("step", STEPS)):
        found.one_of(where, point, key, allowed)
    found.range(where, point)
    if not isinstance(point.get("required", False), bool):
        found.add(where, "required is true or false")
    if point.get("stamp", False) not in (True, False) or (point.get("stamp") and point.get("clock") != "device"):
        found.add(where, 'stamp is true or false, and true only with clock = "device"')
    if "runner" in point and point["runner"] not in runners:
        found.add(where, f"runner = {point['runner']!r} is not declared: {', '.join(runners) or 'no [[runner]] is'}")
    _check_role(found, where, point)
    anchors = _tables(found, where, point, "anchors")
    if "anchors" in point and not anchors:
        found.add(where, "no anchor says where the point is")
    for number, anchor in enumerate(anchors, 1):
        _check_anchor(found, f"{where} anchor {number}", anchor, point.get("kind"))
    values = point.get("values", {})
    if not isinstance(values, dict):
        found.add(where, "values is a table of names and paths")
        return
    for name, path in values.items():
        if not isinstance(path, str) or not _VALUE.match(path):
            found.add(where, f"values.{name} = {path!r}: {_PATH_HINT}")


def _check_knob(found: _Problems, where: str, knob: Mapping[str, Any], points: list[Mapping[str, Any]]) -> None:
    limits = {"among"} if "among" in knob else {"low", "most"}
    found.keys(where, knob, _KNOB, {"name", "point", "path", "shape", "needs"} | limits)
    found.matches(where, knob, "name", _NAME)
    if not isinstance(knob.get("path", ""), str) or not _PLACE.match(knob.get("path", "self.x")):
        found.add(where, f"path = {knob['path']!r}: {_PLACE_HINT}")
    found.one_of(where, knob, "shape", SHAPES)
    found.range(where, knob)
    if knob.get("point") not in [point.get("name") for point in points]:
        found.add(where, f"point = {knob.get('point')!r} is no point of this recipe")
    if type(knob.get("low", 0)) is not int:
        found.add(where, f"low = {knob['low']!r} is not a whole number")
    most = knob.get("most", 0)
    if type(most) is not int and not (isinstance(most, str) and _PLACE.match(most)):
        found.add(where, f"most = {most!r} is neither a whole number nor a path: {_PLACE_HINT}")
    _check_limits(found, where, knob)
    needs = _tables(found, where, knob, "needs")
    if "needs" in knob and not needs:
        found.add(where, "nothing under needs says what reads the number")
    for number, anchor in enumerate(needs, 1):
        _check_anchor(found, f"{where} needs {number}", anchor, "call")


def _check_limits(found: _Problems, where: str, knob: Mapping[str, Any]) -> None:
    if "among" in knob:
        if not isinstance(knob["among"], str) or not _PLACE.match(knob["among"]):
            found.add(where, f"among = {knob['among']!r}: {_PLACE_HINT}")
        for key in sorted(knob.keys() & {"low", "most"}):
            found.add(where, f"{key} means nothing beside among, which leads to the numbers to choose from")
    alone = knob.get("alone", [])
    if not isinstance(alone, list) or not all(isinstance(path, str) and _PLACE.match(path) for path in alone):
        found.add(where, f"alone = {alone!r} is no list of paths: {_PLACE_HINT}")


def _check_role(found: _Problems, where: str, point: Mapping[str, Any]) -> None:
    name, role = str(point.get("name")), point.get("role")
    phase, _, part = name.partition(".")
    if role in ("leaf", "wait") and (phase not in PHASES or not part):
        found.add(where, f"a {role} is named phase.part with a phase of {', '.join(PHASES)}")
    if role == "wait" and phase != "wait":
        found.add(where, "a wait is named wait.part")


def _check_anchor(found: _Problems, where: str, anchor: Mapping[str, Any], kind: object) -> None:
    needed = {"module", "function"} | ({"call"} if kind == "call" else set())
    found.keys(where, anchor, _ANCHOR, needed)
    if kind == "body":
        for key in sorted(anchor.keys() & {"call", "inside", "args"}):
            found.add(where, f"{key} means nothing for a point of kind body")
    found.matches(where, anchor, "module", _MODULE)
    found.matches(where, anchor, "function", _QUALNAME)
    found.one_of(where, anchor, "inside", INSIDE)
    found.regex(where, anchor, "call")
    found.regex(where, anchor, "args")
    found.range(where, anchor)
    sites = anchor.get("sites", 1)
    if not isinstance(sites, int) or isinstance(sites, bool) or sites < 1:
        found.add(where, f"sites = {sites!r} is not a count of at least 1")
