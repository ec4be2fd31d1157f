"""Imports point downward only (docs/architecture.md): what each folder may import, read from its files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specmeter

ROOT = Path(specmeter.__file__).parent
EVERYWHERE = {"errors", "__version__", "kept_runs"}
ALLOWED: dict[str, set[str]] = {
    "runtime": set(),
    "source": {"runtime"},
    "checkpoint": {"errors"},
    "eagle": {"errors", "checkpoint"},
    "recipes": {"errors", "source"},
    "trace": {*EVERYWHERE, "runtime"},
    "control": {*EVERYWHERE, "runtime", "recipes", "source"},
    "analysis": {*EVERYWHERE, "trace"},
    "engines": {*EVERYWHERE, "trace"},
    "reporters": {*EVERYWHERE, "trace", "analysis"},
    "wiring": {*EVERYWHERE, "trace", "control", "runtime", "checkpoint", "eagle"},
}


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, by its absolute name."""
    package = ["specmeter", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level], *((node.module or "").split("."))] if node.level else []
            name = ".".join(filter(None, base)) if node.level else str(node.module)
            yield from (f"{name}.{alias.name}" for alias in node.names) if name == "specmeter" else (name,)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {
        (name.split(".")[1], path.name)
        for path in files
        for name in imported(path)
        if name.startswith("specmeter.") and name.split(".")[1] != folder
    }
    assert {pair for pair in found if pair[0] not in ALLOWED[folder]} == set()


@pytest.mark.parametrize("folder", ["runtime", "checkpoint"])
def test_what_stands_on_the_standard_library_alone(folder: str) -> None:
    tops = {name.split(".")[0] for path in (ROOT / folder).rglob("*.py") for name in imported(path)}
    known = {*sys.stdlib_module_names, "specmeter"} | ({"torch"} if folder == "runtime" else set())
    assert tops - known == set()


def test_commands_are_imported_by_the_command_line_alone() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any(name.startswith("specmeter.commands") for name in imported(path))
    }
    assert {user for user in users if not user.startswith("commands/")} == {"cli.py"}
