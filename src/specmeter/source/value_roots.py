"""Where a point's value paths start in the source: which names are handed to its probe, and what is read of each.

Runs under the server's own interpreter (standard library of CPython 3.9).
"""

from __future__ import annotations

import ast
from typing import Any, List, Mapping, Optional, Set, Tuple

from .refusals import Function, NotPlaced, own_nodes

Roots = List[List[Any]]


def _wanted_roots(point: Mapping[str, Any]) -> List[str]:
    """The roots of the point's value and knob paths in order of first use: ``return``, ``self``, ``argN``, ``kw.X``."""
    roots: List[str] = []
    for path in [*(point.get("values") or {}).values(), *point.get("knob_paths", [])]:
        words = path.replace("[", ".").replace("|", ".").split(".")
        root = ".".join(words[:2]) if words[0] == "kw" else words[0]
        if root not in roots:
            roots.append(root)
    return roots


def call_roots(call: ast.Call, point: Mapping[str, Any], function: Optional[Function]) -> Tuple[List[ast.expr], Roots]:
    """The names to hand to the probe, and for each root of the paths [root, index of the name, attributes...].

    Only plain names are handed over: reading an attribute here could raise in the server's own code. Raises NotPlaced
    where a root leads to anything else, or nowhere.
    """
    names: List[ast.expr] = []
    roots: Roots = []
    for root in _wanted_roots(point):
        if root == "return":
            roots.append([root, -1])
            continue
        node, attributes = _argument(call, root, function), []  # type: Any, List[str]
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise NotPlaced(f"value root {root}: that argument is neither a name nor an attribute of a name")
        roots.append([root, len(names), *attributes])
        names.append(ast.copy_location(ast.Name(node.id, ast.Load()), call))
    return names, roots


def _argument(call: ast.Call, root: str, function: Optional[Function]) -> ast.expr:
    if root == "self":
        arguments = [*function.args.posonlyargs, *function.args.args] if function else []
        if not arguments:
            raise NotPlaced("value root self: the enclosing function has no parameters")
        return ast.Name(arguments[0].arg, ast.Load())
    if root.startswith("kw."):
        for keyword in call.keywords:
            if keyword.arg == root[3:]:
                return keyword.value
        raise NotPlaced(f"value root {root}: the call has no such keyword argument")
    index = _arg_index(root)
    if index >= len(call.args) or any(isinstance(arg, ast.Starred) for arg in call.args[: index + 1]):
        raise NotPlaced(f"value root {root}: the call has no such positional argument")
    return call.args[index]


def body_roots(function: Function, point: Mapping[str, Any]) -> Tuple[List[ast.expr], Roots]:
    """The same for a whole function, whose parameters are meant; one that is bound anew is refused (NotPlaced)."""
    parameters = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    every = {*parameters, *(argument.arg for argument in function.args.kwonlyargs)}
    bound = _bound(function)
    names: List[ast.expr] = []
    roots: Roots = []
    for root in _wanted_roots(point):
        if root == "return":
            roots.append([root, -1])
            continue
        method = bool(parameters) and parameters[0] in ("self", "cls")
        index = 0 if root == "self" else -1 if root.startswith("kw.") else _arg_index(root) + method
        if index >= len(parameters) or (index < 0 and root[3:] not in every):
            raise NotPlaced(f"value root {root}: the function has no such parameter")
        name = parameters[index] if index >= 0 else root[3:]
        if name in bound:
            raise NotPlaced(f"value root {root}: the function binds or deletes {name} anew")
        roots.append([root, len(names)])
        names.append(ast.Name(name, ast.Load()))
    return names, roots


def _bound(function: Function) -> Set[str]:
    """The names that the function's own frame binds or deletes besides its parameters."""
    found: Set[str] = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Name):
            found.update([] if isinstance(node.ctx, ast.Load) else [node.id])
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        else:
            # ``except E as X``, nested definitions, and from 3.10 on the captures of ``match``.
            found.update(name for name in (getattr(node, "name", None), getattr(node, "rest", None)) if name)
    return found


def _arg_index(root: str) -> int:
    if not root.startswith("arg") or not root[3:].isdigit():
        raise NotPlaced(f"unknown value root {root!r}")
    return int(root[3:])
