"""Edits of real source that leave its meaning alone, for property tests of anchors.

Every call of the original tree gets a number; it can be found again after any edit, and after the edited tree has been
written out and parsed anew.
"""

from __future__ import annotations

import ast
import builtins
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Edit = Callable[[ast.Module, random.Random], ast.Module]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def numbered(source: bytes) -> ast.Module:
    """The tree with every call and function numbered in ``_number``."""
    tree = ast.parse(source)
    for number, node in enumerate(_places(tree)):
        node._number = number  # type: ignore[attr-defined]
    return tree


def written(tree: ast.Module, rng: random.Random) -> tuple[str, dict[tuple[int, int, int, int], int]]:
    """The tree as source with blank lines and comments strewn in, and the number of each place by its position there.

    ``ast.unparse`` breaks lines in its own way, so this is a reformatting to another width too.
    """
    ast.fix_missing_locations(tree)
    lines = ast.unparse(tree).split("\n")
    starts = {node.lineno for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.stmt)}
    strewn = []
    for number, line in enumerate(lines, 1):
        if number in starts and not line.lstrip().startswith(("elif", "else", "except", "finally")):
            strewn += rng.choices(["", "# a comment: self.model(x)", None], k=1)
        strewn.append(line)
    text = "\n".join(line for line in strewn if line is not None) + "\n"
    again = _places(ast.parse(text))
    before = _places(tree)
    assert len(again) == len(before)
    return text, {position(new): getattr(old, "_number", -1) for new, old in zip(again, before, strict=True)}


def position(node: Any) -> tuple[int, int, int, int]:
    """Line, column and their ends."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _places(tree: ast.Module) -> list[Any]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Call, *FUNCTIONS))]


def functions_of(tree: ast.Module) -> list[Any]:
    """Every function and method."""
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def reorder_methods(tree: ast.Module, rng: random.Random) -> ast.Module:
    """Shuffle the methods of each class; properties keep their order, as a setter needs its getter first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            movable = [n for n, item in enumerate(node.body) if isinstance(item, FUNCTIONS) and not item.decorator_list]
            moved = [node.body[n] for n in movable]
            rng.shuffle(moved)
            for n, item in zip(movable, moved, strict=True):
                node.body[n] = item
    return tree


def add_decorators(tree: ast.Module, rng: random.Random) -> ast.Module:
    """Decorate some functions."""
    for node in functions_of(tree):
        if rng.random() < 0.4:
            node.decorator_list.insert(0, ast.parse("functools.wraps(print)", mode="eval").body)
    return tree


def wrap_bodies(tree: ast.Module, rng: random.Random) -> ast.Module:
    """Put some functions' bodies into ``try`` or ``with``."""
    for node in functions_of(tree):
        kind = rng.choice(["try", "with", "", ""])
        own = any(isinstance(item, (ast.Nonlocal, ast.Global)) for item in ast.walk(node))
        if not kind or own:
            continue
        shell: Any = ast.parse(
            "try:\n    pass\nfinally:\n    pass" if kind == "try" else "with context:\n    pass"
        ).body[0]
        shell.body = node.body
        node.body = [shell]
    return tree


def add_statements(tree: ast.Module, rng: random.Random) -> ast.Module:
    """Insert and delete lines: assignments go in, docstrings go out."""
    for node in functions_of(tree):
        if ast.get_docstring(node) is not None and len(node.body) > 1 and rng.random() < 0.5:
            node.body.pop(0)
        for _ in range(rng.randrange(3)):
            node.body.insert(rng.randrange(len(node.body) + 1), ast.parse("inserted = 1").body[0])
    return tree


def renaming(kept: set[str]) -> Edit:
    """An edit that renames locals, but for the names in ``kept``: those an anchor's pattern speaks of."""

    def rename(tree: ast.Module, rng: random.Random) -> ast.Module:
        for node in tree.body:
            for function in [node] if isinstance(node, FUNCTIONS) else getattr(node, "body", []):
                if isinstance(function, FUNCTIONS):
                    _rename(function, kept, rng)
        return tree

    return rename


def _rename(function: Any, kept: set[str], rng: random.Random) -> None:
    parameters = {item.arg for item in ast.walk(function.args) if isinstance(item, ast.arg)}
    inside = [node for node in ast.walk(function) if node is not function]
    shared = {name for node in inside if isinstance(node, (ast.Nonlocal, ast.Global)) for name in node.names}
    imported = {
        (item.asname or item.name).split(".")[0]
        for node in inside
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for item in node.names
    }
    stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    taken = (
        parameters
        | shared
        | imported
        | kept
        | set(dir(builtins))
        | {node.name for node in inside if hasattr(node, "name")}
    )
    new = {name: f"{name}_renamed" for name in sorted(stored - taken) if rng.random() < 0.7}
    for node in inside:
        if isinstance(node, ast.Name) and node.id in new:
            node.id = new[node.id]


def names_in_patterns(anchors: Sequence[Mapping[str, Any]]) -> set[str]:
    """Identifiers that the anchors' patterns speak of."""
    return {
        word
        for anchor in anchors
        for word in re.findall(r"[^\W\d]\w*", anchor.get("call", "") + " " + anchor.get("args", ""))
    }


def without_calls(tree: ast.Module, numbers: set[int]) -> ast.Module:
    """The tree with the calls of these numbers replaced by a name."""

    class Remover(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            return ast.Name("removed", ast.Load()) if getattr(node, "_number", -1) in numbers else node

    return Remover().visit(tree)  # type: ignore[no-any-return]


EDITS: dict[str, Edit] = {
    "reorder": reorder_methods,
    "decorate": add_decorators,
    "wrap": wrap_bodies,
    "insert": add_statements,
}
