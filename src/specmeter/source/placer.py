"""Wraps the calls and bodies of a module's points in place, and says of each that cannot be why.

Runs under the server's own interpreter (standard library of CPython 3.9).
"""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from .probe_nodes import begin, end, know_thread, wrap_statements
from .refusals import (
    FRAME_SENSITIVE,
    Function,
    NotPlaced,
    Scope,
    calls_locals,
    check_scope,
    is_plain,
    lazy_functions,
)
from .value_roots import Roots, body_roots, call_roots


class Placer(ast.NodeTransformer):
    """Wraps the calls and bodies of the points; keeps the enclosing scopes to judge and name each place."""

    def __init__(self, tree: ast.Module, points: Sequence[Mapping[str, Any]]) -> None:
        self.tree = tree
        self.done: Dict[int, Roots] = {}
        self.reasons: Dict[int, str] = {}
        self.functions: Dict[Tuple[str, int], Set[int]] = {}
        self.lazy = lazy_functions(tree)
        self._scopes: List[Scope] = []
        self._calls: Dict[Tuple[int, int, int, int], Mapping[str, Any]] = {}
        self._bodies: Dict[Tuple[int, int], Mapping[str, Any]] = {}
        self._ends: Dict[int, List[ast.Call]] = {}  # of the functions being visited, those in their own frame
        self._comprehensions = 0
        for point in points:
            self._claim(point)

    def _claim(self, point: Mapping[str, Any]) -> None:
        where = (point["line"], point["col"], point["end_line"], point["end_col"])
        if point["kind"] == "body":
            taken: Any = self._bodies.setdefault(where[:2], point)
        elif point["kind"] == "call":
            taken = self._calls.setdefault(where, point)
        else:
            self.reasons[point["id"]] = f"unknown kind {point['kind']!r}"
            return
        if taken is not point:
            self.reasons[point["id"]] = f"point {taken['name']} claims the same {point['kind']}"

    def refusals(self, points: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
        """The points not placed, in the plan's order."""
        missing = "no such call at that position in this file"
        return [
            {"id": point["id"], "reason": self.reasons.get(point["id"], missing)}
            for point in points
            if point["id"] not in self.done
        ]

    # -- scopes ---------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        for field in ("decorator_list", "bases", "keywords"):
            setattr(node, field, [self.visit(child) for child in getattr(node, field)])
        return self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args = self.visit(node.args)
        self._scopes.append(node)
        node.body = self.visit(node.body)
        self._scopes.pop()
        return node

    def _function(self, node: Function) -> ast.AST:
        # Decorators and defaults run in the scope around the function.
        node.decorator_list = [self.visit(child) for child in node.decorator_list]
        node.args = self.visit(node.args)
        point = self._bodies.get((node.lineno, node.col_offset))
        self._inside(node)
        if point is not None:
            self._scopes.append(node)
            self._try(point, lambda: self._wrap_body(node, point))
            self._scopes.pop()
        ends = self._ends.pop(id(node), [])
        # A coroutine may go on in another thread, and who looks at its names must see its own.
        if ends and isinstance(node, ast.FunctionDef) and not calls_locals(node):
            know_thread(node, ends)
        return node

    def _inside(self, node: Any) -> ast.AST:
        self._scopes.append(node)
        node.body = [self.visit(child) for child in node.body]
        self._scopes.pop()
        return node  # type: ignore[no-any-return]

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._comprehension(node)

    def _comprehension(self, node: ast.AST) -> ast.AST:
        self._comprehensions += 1
        self.generic_visit(node)
        self._comprehensions -= 1
        return node

    # -- calls ----------------------------------------------------------------------------------------------------

    def visit_Await(self, node: ast.Await) -> ast.AST:
        point = self._calls.get(_where(node.value)) if isinstance(node.value, ast.Call) else None
        point = point or self._calls.get(_where(node))
        if point is None:
            return self.generic_visit(node)
        call = node.value
        self.generic_visit(call)
        return self._try(point, lambda: self._wrap_call(node, call, point)) or node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        point = self._calls.get(_where(node))
        self.generic_visit(node)
        if point is None:
            return node
        return self._try(point, lambda: self._wrap_call(node, node, point, awaited=False)) or node

    def _try(self, point: Mapping[str, Any], place: Any) -> Optional[ast.AST]:
        if point["id"] in self.done:
            self.reasons[point["id"]] = "two places of the file have that position"
            return None
        try:
            return place()  # type: ignore[no-any-return]
        except NotPlaced as reason:
            self.reasons[point["id"]] = str(reason)
            return None

    def _wrap_call(self, node: ast.expr, call: Any, point: Mapping[str, Any], awaited: bool = True) -> ast.AST:
        key = self._check_scopes()
        if not isinstance(call, ast.Call):
            raise NotPlaced("what is awaited there is not a call")
        callee = ast.unparse(call.func)
        if callee in FRAME_SENSITIVE or callee.split("(")[0] in FRAME_SENSITIVE - {"super"}:
            raise NotPlaced(f"{callee} looks at the frame or the names around it")
        lazy = None if awaited else self.lazy.get(callee.rsplit(".", 1)[-1])
        if lazy and is_plain(call.func):
            raise NotPlaced(f"the call only creates a {lazy}: nothing of its work happens there")
        names, roots = call_roots(call, point, self._nearest())
        self._place_in(key, point, roots)
        return self._end(end(node, point["id"], begin(node, point["id"]), node, names))

    def _wrap_body(self, node: Function, point: Mapping[str, Any]) -> ast.AST:
        key = self._check_scopes()
        if calls_locals(node):
            raise NotPlaced("the function looks at its own names (locals, vars, eval, exec or dir)")
        names, roots = body_roots(node, point)
        self._place_in(key, point, roots)
        self._end(wrap_statements(node, point["id"], names, any(root[0] == "return" for root in roots)))
        return node

    def _end(self, call: ast.Call) -> ast.Call:
        """Note an end that runs in the frame of the function around it."""
        scope = self._scopes[-1]
        if isinstance(scope, ast.FunctionDef) and not self._comprehensions:
            self._ends.setdefault(id(scope), []).append(call)
        return call

    def _place_in(self, key: Tuple[str, int], point: Mapping[str, Any], roots: Roots) -> None:
        self.functions.setdefault(key, set()).add(point["id"])
        self.done[point["id"]] = roots

    def _nearest(self) -> Optional[Function]:
        for scope in reversed(self._scopes):
            if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return scope
        return None

    def _check_scopes(self) -> Tuple[str, int]:
        """The outermost function's (qualname, first line); raises where no probe may stand."""
        functions = [scope for scope in self._scopes if not isinstance(scope, ast.ClassDef)]
        if not functions:
            raise NotPlaced("it is not inside a function: module and class bodies run once, at import")
        outer = functions[0]
        if isinstance(outer, ast.Lambda):
            raise NotPlaced("it is inside a lambda, which has no name to find it by")
        for scope in self._scopes:
            check_scope(scope, functions)
        index = self._scopes.index(outer)
        names = [scope.name for scope in self._scopes[: index + 1] if not isinstance(scope, ast.Lambda)]
        first = min([outer.lineno, *(decorator.lineno for decorator in outer.decorator_list)])
        return ".".join(names), first


def _where(node: Any) -> Tuple[int, int, int, int]:
    return (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
