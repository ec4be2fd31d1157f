"""Functions and calls of one module's syntax tree, indexed for anchors and outlines."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Dict, FrozenSet, Iterator, List, Tuple, Union

FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NONE: FrozenSet[str] = frozenset()


@dataclass(frozen=True)
class Call:
    """A call in a function's own body. ``around`` holds ``for``, ``while`` and ``with`` for what encloses it there."""

    node: ast.Call
    callee: str
    around: FrozenSet[str]

    def arguments(self) -> str:
        """The call's arguments, unparsed and joined by commas."""
        positional = [unparse(item) for item in self.node.args]
        named = [
            f"{item.arg}={unparse(item.value)}" if item.arg else f"**{unparse(item.value)}"
            for item in self.node.keywords
        ]
        return ", ".join(positional + named)


def unparse(node: ast.AST) -> str:
    """``ast.unparse`` with a short way for names and attributes of names, which most callees are."""
    parts: List[str] = []
    item = node
    while isinstance(item, ast.Attribute):
        parts.append(item.attr)
        item = item.value
    if isinstance(item, ast.Name):
        parts.append(item.id)
        return ".".join(reversed(parts))
    return ast.unparse(node)


def functions(tree: ast.Module) -> Dict[str, List[FunctionNode]]:
    """All functions by qualified name (``Class.method``, ``outer.<locals>.inner``); a name may have several.

    Left out is what never runs under its name: definitions for type checkers alone, and those that a later one of the
    same block replaces.
    """
    found: Dict[str, List[FunctionNode]] = {}
    pending: List[Tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        parent, prefix = pending.pop()
        for node in _lasting(parent):
            if isinstance(node, _FUNCTIONS):
                found.setdefault(prefix + node.name, []).append(node)
                pending.append((node, f"{prefix}{node.name}.<locals>."))
            else:
                pending.append((node, f"{prefix}{node.name}."))
    for nodes in found.values():
        nodes.sort(key=lambda node: node.lineno)
    return found


def statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """Statements of the parent's own scope, those in ``if``, ``try``, ``with``, ``match`` and loops too."""
    for block in _blocks(parent):
        for node in block:
            if isinstance(node, ast.stmt):
                yield node


def _lasting(parent: ast.AST) -> Iterator[Union[FunctionNode, ast.ClassDef]]:
    """The definitions of the parent's own scope that a name leads to once its block has run."""
    for block in _blocks(parent, for_checkers=False):
        later: Dict[str, ast.AST] = {}
        for node in reversed(block):
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                continue
            after = later.get(node.name)
            if after is None or _builds_on(after, node.name):
                yield node
            later[node.name] = node


def _builds_on(definition: ast.AST, name: str) -> bool:
    """Whether the definition's decorators speak of what had its name before, as ``@size.setter`` does."""
    decorators = definition.decorator_list  # type: ignore[attr-defined]
    return any(isinstance(node, ast.Name) and node.id == name for item in decorators for node in ast.walk(item))


def _blocks(parent: ast.AST, for_checkers: bool = True) -> Iterator[List[ast.AST]]:
    """The lists of statements (handlers, cases) of the parent's own scope; without ``if TYPE_CHECKING:`` at will."""
    pending: List[ast.AST] = [parent]
    while pending:
        item = pending.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(item, field, None)
            if not isinstance(inner, list) or (field == "body" and not for_checkers and _is_for_checkers(item)):
                continue
            yield inner
            pending.extend(node for node in inner if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)))


def _is_for_checkers(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def calls(function: ast.AST) -> List[Call]:
    """The calls that the own body of a function (or class or module) makes, in source order.

    Bodies of nested functions, classes and lambdas are left out; decorators and defaults of nested functions belong to
    the body. A comprehension counts as ``for`` except for its first iterable, which is evaluated once, outside.
    """
    found: List[Call] = []
    # An explicit stack: the engines' longest functions are deep enough to make recursion slow.
    pending: List[Tuple[ast.AST, FrozenSet[str]]] = [(node, _NONE) for node in function.body]  # type: ignore[attr-defined]
    while pending:
        node, around = pending.pop()
        if isinstance(node, ast.Call):
            found.append(Call(node, unparse(node.func), around))
        pending.extend(_inner(node, around))
    found.sort(key=lambda call: (call.node.lineno, call.node.col_offset, -(call.node.end_lineno or 0)))
    return found


def _inner(node: ast.AST, around: FrozenSet[str]) -> List[Tuple[ast.AST, FrozenSet[str]]]:
    if isinstance(node, (ast.For, ast.AsyncFor)):
        inside = around | {"for"}
        outer = [node.iter, *node.orelse]
        return [(item, inside) for item in (node.target, *node.body)] + [(item, around) for item in outer]
    if isinstance(node, ast.While):
        inside = around | {"while"}
        return [(item, inside) for item in (node.test, *node.body)] + [(item, around) for item in node.orelse]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        inside = around | {"with"}
        return [(item, around) for item in node.items] + [(item, inside) for item in node.body]
    if isinstance(node, _COMPREHENSIONS):
        return _inner_comprehension(node, around)
    if isinstance(node, _FUNCTIONS):
        defaults = [item for item in (*node.args.defaults, *node.args.kw_defaults) if item is not None]
        return [(item, around) for item in (*node.decorator_list, *defaults)]
    if isinstance(node, ast.ClassDef):
        return [(item, around) for item in (*node.decorator_list, *node.bases, *node.keywords)]
    if isinstance(node, ast.Lambda):
        defaults = [item for item in (*node.args.defaults, *node.args.kw_defaults) if item is not None]
        return [(item, around) for item in defaults]
    return [(item, around) for item in ast.iter_child_nodes(node)]


def _inner_comprehension(node: ast.AST, around: FrozenSet[str]) -> List[Tuple[ast.AST, FrozenSet[str]]]:
    inside = around | {"for"}
    first = node.generators[0]  # type: ignore[attr-defined]
    inner = [(item, inside) for item in ast.iter_child_nodes(node) if item is not first]
    inner += [(item, inside) for item in ast.iter_child_nodes(first) if item is not first.iter]
    return [*inner, (first.iter, around)]
