"""Turns a recipe into a plan: what will be measured in the engine of one environment, with file and line."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes import loader
from specmeter.recipes.asking import ELSEWHERE, ask_far
from specmeter.recipes.loader import Recipe

# Where several engines are installed together, an engine that serves comes before the one that specmeter itself ships.
_LAST = "specmeter"


@dataclass(frozen=True)
class Planned:
    """A plan as ``plan.json`` holds it, and the marshalled replacement code by module (empty for a bare tree)."""

    plan: dict[str, Any]
    code: dict[str, bytes]


def build_plan(
    python: Path,
    engine: str | None = None,
    recipe: Path | Sequence[Path] | None = None,
    env: Mapping[str, str] | None = None,
    path: Path | None = None,
    with_code: bool = True,
    knobs: Sequence[str] = (),
    only: Collection[str] | None = None,
    first: Sequence[str] = (),
) -> Planned:
    """Resolve the recipe of ``engine`` (``NAME`` or ``NAME==VERSION``) in the environment of ``python``.

    ``env`` is the environment the server will have (this process's own by default), ``path`` an unpacked wheel or
    source tree to read instead of the environment: there is no code then. ``recipe`` replaces the built-in recipe.
    ``knobs`` names those that the server's processes shall open; ``only`` the points to plan, instead of all; ``first``
    the folders that its command puts before the search path.
    Raises SpecmeterError: exit 1 when a required point is missing, 2 for a recipe or name that is wrong, 3 when the
    engine's version is outside the recipe's ranges, 5 when the environment lacks the engine or a working Python.
    """
    planned = survey(python, engine, recipe, env, path, with_code, first, knobs, only)
    missing = [item for item in planned.plan["refused"] if item["required"]]
    if missing:
        raise missing_points(planned.plan, missing)
    return planned


def survey(
    python: Path,
    engine: str | None = None,
    recipe: Path | Sequence[Path] | None = None,
    env: Mapping[str, str] | None = None,
    path: Path | None = None,
    with_code: bool = True,
    first: Sequence[str] = (),
    knobs: Sequence[str] = (),
    only: Collection[str] | None = None,
) -> Planned:
    """As ``build_plan``, but a missing required point is only listed under ``refused``.

    ``first`` are folders before the search path, as a running server's own folder is.
    """
    name, _, version = (engine or "").partition("==")
    recipes = _recipes(python, loader.canonical(name), recipe, env, path, first)
    request = {
        "op": "resolve",
        "recipes": [item.data for item in recipes],
        "engine_version": version or None,
        "path": str(path.resolve()) if path else None,
        "with_code": with_code and path is None,
        "entries_first": list(first),
        "knobs": list(knobs),
        "only": None if only is None else sorted(only),
    }
    answer = ask_far(python, request, env)
    if not answer["points"] and not any(item["reached"] for item in answer["refused"]):
        raise _not_there(python, answer["engine"], path)
    if answer["conflicts"]:
        raise _conflict(answer["conflicts"])
    code = {module: base64.b64decode(blob) for module, blob in answer.pop("code").items()}
    answer.pop("conflicts")
    return Planned({"recipe_sha256": loader.combined_hash(recipes), **answer}, code)


def _recipes(
    python: Path,
    engine: str,
    given: Path | Sequence[Path] | None,
    env: Mapping[str, str] | None,
    path: Path | None,
    first: Sequence[str],
) -> list[Recipe]:
    if given:
        paths = [given] if isinstance(given, Path) else list(given)
        recipes = [loader.load(item) for item in paths]
        names = {item.engine for item in recipes} | ({engine} if engine else set())
        if len(names) > 1:
            raise SpecmeterError(f"These recipes are for different engines: {', '.join(sorted(names))}.")
        return recipes
    if engine:
        return [loader.built_in(engine)]
    return [_detect(python, env, path, first)]


def _detect(python: Path, env: Mapping[str, str] | None, path: Path | None, first: Sequence[str]) -> Recipe:
    recipes = [loader.built_in(name) for name in loader.built_in_engines()]
    if path:
        present = [item for item in recipes if _tree_holds(path, item)]
        found = [item.engine for item in present]
    else:
        request = {"op": "engines", "recipes": [item.data for item in recipes], "entries_first": list(first)}
        found = [item["engine"] for item in ask_far(python, request, env)["engines"]]
    serving = [name for name in found if name != _LAST]
    if len(serving) > 1:
        raise SpecmeterError(
            f"Several engines are installed for {python}: {', '.join(serving)}.",
            next_step=f"Say which: --engine {serving[0]}",
        )
    chosen = (serving or found)[:1]
    if not chosen:
        raise SpecmeterError(
            f"No engine that specmeter has a recipe for is in {path or f'the environment of {python}'}.",
            why=f"Looked for: {', '.join(item.engine for item in recipes)}.",
            next_step="Name the server's own interpreter with --python, or an unpacked tree with --path and --engine.",
            exit=Exit.ENVIRONMENT,
        )
    return next(item for item in recipes if item.engine == chosen[0])


def _tree_holds(path: Path, recipe: Recipe) -> bool:
    packages = {anchor["module"].split(".")[0] for point in recipe.data["point"] for anchor in point["anchors"]}
    places = (path, path / "python", path / "src", path.parent if path.name in packages else path)
    return any((place / name).is_dir() or (place / f"{name}.py").is_file() for place in places for name in packages)


def _not_there(python: Path, engine: str, path: Path | None) -> SpecmeterError:
    """The error for an engine of which not even the package was found: one line in place of a refusal a point."""
    return SpecmeterError(
        f"{engine} is not in {path or f'the environment of {python}'}: no package of its recipe is there.",
        next_step=ELSEWHERE,
        exit=Exit.ENVIRONMENT,
    )


def _conflict(conflicts: Sequence[Mapping[str, Any]]) -> SpecmeterError:
    listed = "; ".join(
        f"{item['first']} and {item['second']} both claim {item['path']}:{item['line']} `{item['text']}`"
        for item in conflicts
    )
    return SpecmeterError("Two points of the recipe claim one call.", why=listed, next_step="Remove one of the two.")


def missing_points(plan: Mapping[str, Any], missing: Sequence[Mapping[str, Any]]) -> SpecmeterError:
    """The error for required points that are not there, each with how far the search got and what comes near."""
    listed = []
    for item in missing:
        near = f" (nearest: {'; '.join(item['nearest'])})" if item["nearest"] else ""
        listed.append(f"{item['name']}: {item['reason']}{near}")
    return SpecmeterError(
        f"{plan['engine']} {plan['engine_version']} lacks {len(missing)} required point(s).",
        why="; ".join(listed),
        next_step="`specmeter plan` shows every point; a fork needs a recipe of its own: --recipe (docs/recipes.md).",
        exit=Exit.FINDING,
    )
