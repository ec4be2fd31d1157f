"""From recipes to the parts of a plan: choose the version's points, resolve their anchors, rewrite and compile."""

from __future__ import annotations

import ast
import base64
import os
import sys
from dataclasses import asdict
from importlib.util import MAGIC_NUMBER
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import versions
from .anchors import Refusal, Resolver, Site
from .knobs import drop_lost, open_knobs, resolve_knobs
from .pyfile import SourceError

Plain = Dict[str, Any]
_COPIED = ("name", "role", "kind", "clock", "required", "step", "stamp", "runner", "about")


def engines(recipes: Sequence[Mapping[str, Any]], entries: Sequence[str]) -> List[Plain]:
    """Which of the recipes' engines the search path holds: ``[{"engine", "dist", "version"}]``, each once."""
    found: Dict[str, Plain] = {}
    for recipe in recipes:
        for entry in recipe["versions"]:
            hit = versions.installed(entry["dist"], entries)
            if hit:
                found.setdefault(recipe["engine"], {"engine": recipe["engine"], "dist": hit[0], "version": hit[1]})
    return list(found.values())


def resolve_recipes(request: Mapping[str, Any]) -> Plain:
    """The plan's parts for the recipes of one engine, all of which the request holds under ``recipes``.

    Gives ``engine, engine_version, python, modes, runners, points, refused, conflicts, value_ids, knobs, knobs_refused,
    code``. ``knobs`` of the request names those to be open, ``only`` the points to take (all without it). Raises
    SourceError when the engine is not there or its version is outside every range.
    """
    recipes = request["recipes"]
    version, entries = _version_and_entries(request)
    only = request.get("only")
    picked = [
        (point, recipe)
        for recipe in recipes
        for point in _points_for(recipe, version)
        if only is None or point["name"] in only
    ]
    resolver = Resolver(entries)
    points: List[Plain] = []
    refused: List[Plain] = []
    for point, _ in picked:
        outcome = _resolve_point(point, resolver, version)
        if isinstance(outcome, Refusal):
            refused.append(_refused(point, outcome.reason, outcome.reached, outcome.nearest))
            continue
        for site in outcome:
            points.append(
                {"id": len(points) + 1, **_description(point), **asdict(site), "values": point.get("values", {})}
            )
    conflicts = _conflicts(points)
    value_ids = _value_ids(points)
    described = [knob for recipe in recipes for knob in recipe.get("knob", [])]
    knobs, knobs_refused = resolve_knobs(described, points, resolver, version)
    open_knobs(knobs, points, request.get("knobs") or [])
    code: Dict[str, str] = {}
    if request.get("with_code") and not conflicts:
        code = _compile(points, refused, resolver)
        drop_lost(knobs, knobs_refused, points)
    return {
        "engine": recipes[0]["engine"],
        "engine_version": version,
        "python": python_facts(),
        "modes": recipes[0].get("modes"),
        "runners": _runners(recipes, version, refused),
        "points": points,
        "refused": refused,
        "conflicts": conflicts,
        "value_ids": value_ids,
        "knobs": knobs,
        "knobs_refused": knobs_refused,
        "code": code,
    }


def python_facts() -> Plain:
    """What the plan says of the interpreter; code marshalled here loads only where ``magic`` is the same."""
    return {
        "executable": sys.executable,
        "version": ".".join(str(part) for part in sys.version_info[:3]),
        "cache_tag": sys.implementation.cache_tag,
        "magic": MAGIC_NUMBER.hex(),
    }


def _version_and_entries(request: Mapping[str, Any]) -> Tuple[str, List[str]]:
    recipes = request["recipes"]
    engine = recipes[0]["engine"]
    dists = [dist for recipe in recipes for entry in recipe["versions"] for dist in entry["dist"]]
    packages = sorted(
        {
            anchor["module"].split(".")[0]
            for recipe in recipes
            for point in recipe["point"]
            for anchor in point["anchors"]
        }
    )
    tree = request.get("path")
    if tree:
        entries = versions.tree_roots(tree, packages)
        if not entries:
            raise SourceError(f"{tree} holds no package or module {' or '.join(packages)}", reached=tree)
        found = versions.of_tree(dists, packages, entries)
    else:
        entries = [*request.get("entries_first", []), *sys.path]
        found = versions.installed(dists, entries)
    version = request.get("engine_version") or (found[1] if found else None)
    if version is None:
        where = tree or f"the environment of {sys.executable}"
        raise SourceError(f"no metadata of {engine} ({', '.join(dists)}) in {where}", reached="version")
    ranges = [entry["range"] for recipe in recipes for entry in recipe["versions"]]
    if not any(versions.in_range(version, spec) for spec in ranges):
        raise SourceError(
            f"{engine} {version} is outside every range of its recipe: {'; '.join(ranges)}", reached="range"
        )
    return version, entries


def _points_for(recipe: Mapping[str, Any], version: str) -> List[Plain]:
    if not any(versions.in_range(version, entry["range"]) for entry in recipe["versions"]):
        return []
    known = {runner["name"]: runner.get("range", "") for runner in recipe.get("runner", [])}
    return [
        point
        for point in recipe["point"]
        if versions.in_range(version, point.get("range", ""))
        and (not point.get("runner") or versions.in_range(version, known[point["runner"]]))
    ]


def _runners(recipes: Sequence[Mapping[str, Any]], version: str, refused: Sequence[Plain]) -> List[Plain]:
    missing = [item for item in refused if item["required"]]
    runners = []
    for recipe in recipes:
        for runner in recipe.get("runner", []):
            if versions.in_range(version, runner.get("range", "")):
                names = [item["name"] for item in missing if item["runner"] in (None, runner["name"])]
                runners.append({"name": runner["name"], "about": runner.get("about", ""), "required_missing": names})
    return runners


def _resolve_point(point: Mapping[str, Any], resolver: Resolver, version: str) -> Union[List[Site], Refusal]:
    """The first anchor that resolves wins; otherwise the refusal of the one that got furthest."""
    best: Optional[Refusal] = None
    for anchor in point["anchors"]:
        if not versions.in_range(version, anchor.get("range", "")):
            continue
        outcome = resolver.resolve(anchor, point["kind"])
        if not isinstance(outcome, Refusal):
            return outcome
        if best is None or _depth(outcome) > _depth(best):
            best = outcome
    return best or Refusal(f"no anchor is for version {version}", "range")


def _depth(refusal: Refusal) -> Tuple[int, int]:
    return refusal.reached.count(":"), refusal.reached.count(".")


def _description(point: Mapping[str, Any]) -> Plain:
    return {key: point.get(key) for key in _COPIED}


def _refused(point: Mapping[str, Any], reason: str, reached: str, nearest: Sequence[str]) -> Plain:
    return {**_description(point), "reason": reason, "reached": reached, "nearest": list(nearest)}


def _conflicts(points: Sequence[Plain]) -> List[Plain]:
    """Calls that two points claim: ``[{"first", "second", "path", "line", "text"}]``."""
    claimed: Dict[Tuple[Any, ...], Plain] = {}
    conflicts = []
    for point in points:
        place = tuple(point[key] for key in ("path", "line", "col", "end_line", "end_col", "kind"))
        first = claimed.setdefault(place, point)
        if first is not point:
            where = {key: point[key] for key in ("path", "line", "text")}
            conflicts.append({"first": first["name"], "second": point["name"], **where})
    return conflicts


def _value_ids(points: Sequence[Plain]) -> Dict[str, int]:
    names = dict.fromkeys(f"{point['name']}.{value}" for point in points for value in point["values"])
    return {name: len(points) + 1 + number for number, name in enumerate(names)}


def _compile(points: List[Plain], refused: List[Plain], resolver: Resolver) -> Dict[str, str]:
    """Rewritten code of each module, base64; points that the rewriter refuses move from ``points`` to ``refused``."""
    from .rewrite import rewrite_module

    code: Dict[str, str] = {}
    for name in dict.fromkeys(point["module"] for point in points):
        module = resolver.module(name)
        own = [point for point in points if point["module"] == name]
        result = rewrite_module(
            module.tree, module.located.path, name, module.file.sha256, own, _imported(name, own, resolver)
        )
        for item in result["refused"]:
            point = next(point for point in own if point["id"] == item["id"])
            points.remove(point)
            where = f"{point['module']}:{point['qualname']}:{point['line']}"
            refused.append(_refused(point, item["reason"], where, [f"line {point['line']}: {point['text']}"]))
        code[name] = base64.b64encode(result["blob"]).decode("ascii")
    return code


def _imported(name: str, points: Sequence[Plain], resolver: Resolver) -> Dict[str, str]:
    """Coroutines and generators among what the module imports from its own package and its points call."""
    from .refusals import lazy_functions

    module = resolver.module(name)
    wanted = {point["text"].split("(")[0] for point in points if point["kind"] == "call"}
    package = name if os.path.basename(module.located.path) == "__init__.py" else name.rpartition(".")[0]
    found: Dict[str, str] = {}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ImportFrom) or not any((a.asname or a.name) in wanted for a in node.names):
            continue
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        if source.split(".")[0] != name.split(".")[0]:
            continue
        try:
            lazy = lazy_functions(resolver.module(source).tree)
        except SourceError:
            continue  # compiled, or a name of the package itself: the runtime looks at what the call gives back
        names = {a.asname or a.name: a.name for a in node.names if a.name in lazy}
        found.update({local: lazy[there] for local, there in names.items() if local in wanted})
    return found
