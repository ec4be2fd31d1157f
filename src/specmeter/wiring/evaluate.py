"""A small evaluator of Python syntax trees: what an engine's setter does with layer ids, without running the engine.

It knows integers, strings, lists, dictionaries, conditions, comprehensions, attribute assignments and method calls on
objects whose class is in the source tree. Everything else (tensors, parallel groups, loggers) is *unknown*: it can be
passed around, and counts as true. Nothing of Python's own is reachable from the evaluated code: no imports, no I/O.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from specmeter.wiring.evaluate_expressions import Expressions
from specmeter.wiring.evaluate_values import (
    BUILTINS,
    METHODS,
    Bound,
    Instance,
    Raised,
    Undecided,
    Unknown,
    as_items,
    bind,
    guarded,
)

MAX_DEPTH = 30
# The name under which a running function's own syntax tree is kept among its variables: super() starts from it.
CURRENT = "<function>"


class _Return(Exception):
    def __init__(self, value: object) -> None:
        self.value = value


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class Evaluator(Expressions):
    """Evaluates functions and statements on top of expressions."""

    _depth = 0

    def call(self, function: ast.FunctionDef, arguments: list[object], keywords: dict[str, object]) -> object:
        """Call a function of the tree. Raises Raised and Undecided."""
        if self._depth >= MAX_DEPTH:
            raise Undecided(f"{function.name} calls too deeply")
        names = bind(function, arguments, keywords, lambda node: self.value(node, {}))
        names[CURRENT] = function
        self._depth += 1
        try:
            self.run(function.body, names)
        except _Return as result:
            return result.value
        finally:
            self._depth -= 1
        return None

    def run(self, body: Iterable[ast.stmt], names: dict[str, object]) -> None:
        """Run statements with ``names`` as their local variables."""
        for statement in body:
            self.step()
            self._statement(statement, names)

    def _statement(self, node: ast.stmt, names: dict[str, object]) -> None:
        if isinstance(node, ast.Return):
            raise _Return(None if node.value is None else self.value(node.value, names))
        if isinstance(node, ast.Assign):
            value = self.value(node.value, names)
            for target in node.targets:
                self.store(target, value, names)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.store(node.target, self.value(node.value, names), names)
        elif isinstance(node, ast.AugAssign):
            read = ast.copy_location(ast.BinOp(_as_load(node.target), node.op, node.value), node)
            self.store(node.target, self.value(read, names), names)
        elif isinstance(node, ast.Expr):
            self.value(node.value, names)
        elif isinstance(node, ast.If):
            self.run(node.body if self.truth(node.test, names) else node.orelse, names)
        elif isinstance(node, ast.For):
            self._for(node, names)
        elif isinstance(node, ast.Try):
            self._try(node, names)
        elif isinstance(node, ast.With):
            self.run(node.body, names)
        elif isinstance(node, ast.Raise):
            kind = ast.unparse(node.exc).split("(")[0] if node.exc is not None else "Exception"
            raise Raised(kind, ast.unparse(node.exc) if node.exc is not None else "", node.lineno)
        elif isinstance(node, ast.Break):
            raise _Break
        elif isinstance(node, ast.Continue):
            raise _Continue
        elif not isinstance(node, (ast.Pass, ast.Assert, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Delete)):
            raise Undecided(f"line {node.lineno}: {type(node).__name__}")

    def _for(self, node: ast.For, names: dict[str, object]) -> None:
        items = self.value(node.iter, names)
        if isinstance(items, Unknown):
            return
        try:
            for item in as_items(items, node.lineno):
                self.store(node.target, item, names)
                try:
                    self.run(node.body, names)
                except _Continue:
                    continue
        except _Break:
            return
        self.run(node.orelse, names)

    def _try(self, node: ast.Try, names: dict[str, object]) -> None:
        try:
            self.run(node.body, names)
        except Raised as raised:
            for handler in node.handlers:
                caught = None if handler.type is None else ast.unparse(handler.type)
                if caught is None or raised.kind in caught or "Exception" in caught:
                    self.run(handler.body, names)
                    break
            else:
                raise
        else:
            self.run(node.orelse, names)
        self.run(node.finalbody, names)

    def _call(self, node: ast.Call, names: dict[str, object]) -> object:
        arguments = self._items(node.args, names)
        keywords = {word.arg: self.value(word.value, names) for word in node.keywords if word.arg is not None}
        if isinstance(node.func, ast.Name) and node.func.id not in names:
            return self._builtin(node, node.func.id, arguments, keywords)
        if isinstance(node.func, ast.Attribute) and _is_super(node.func.value):
            return self._call_super(node, names, arguments, keywords)
        function = self.value(node.func, names)
        if not isinstance(function, Bound):
            return Unknown("call")
        if function.function is not None:
            static = any(ast.unparse(d) == "staticmethod" for d in function.function.decorator_list)
            return self.call(function.function, arguments if static else [function.owner, *arguments], keywords)
        return guarded(node.lineno, lambda: METHODS[function.name](function.owner, *arguments))

    def _call_super(
        self, node: ast.Call, names: dict[str, object], arguments: list[object], keywords: dict[str, object]
    ) -> object:
        owner, method = names.get("self"), node.func
        current = names.get(CURRENT)
        if isinstance(owner, Instance) and owner.view is not None and isinstance(method, ast.Attribute):
            above = owner.view.method(method.attr, current if isinstance(current, ast.FunctionDef) else None)
            if above is not None:
                return self.call(above, [owner, *arguments], keywords)
        return Unknown("super")

    def _builtin(self, node: ast.Call, name: str, arguments: list[object], keywords: dict[str, object]) -> object:
        if name == "getattr" and len(arguments) >= 2:
            return self._getattr(node, arguments)
        if name == "hasattr" and len(arguments) == 2:
            return self._hasattr(node, arguments)
        if name == "setattr" and len(arguments) == 3:
            self.set_attribute(arguments[0], str(arguments[1]), arguments[2])
            return None
        if name == "isinstance":
            return self._isinstance(node, arguments)
        if name == "cast" and len(arguments) == 2:
            return arguments[1]
        if name == "type":
            return Unknown("type")
        function = BUILTINS.get(name)
        if function is None or any(isinstance(argument, Unknown) for argument in arguments):
            return Unknown(name)
        return guarded(node.lineno, lambda: function(*arguments))

    def _getattr(self, node: ast.Call, arguments: list[object]) -> object:
        owner, name = arguments[0], str(arguments[1])
        try:
            return self.get_attribute(owner, name, node.lineno)
        except Raised:
            if len(arguments) == 3:
                return arguments[2]
            raise

    def _hasattr(self, node: ast.Call, arguments: list[object]) -> object:
        owner, name = arguments[0], str(arguments[1])
        if isinstance(owner, Instance) and owner.view is not None and not owner.closed:
            known = name in owner.fields or owner.view.method(name) is not None
            return known or owner.view.attribute(name) is not None
        try:
            self.get_attribute(owner, name, node.lineno)
        except Raised:
            return False
        return True

    def _isinstance(self, node: ast.Call, arguments: list[object]) -> object:
        kinds = ast.unparse(node.args[1])
        value = arguments[0]
        for kind, known in (("list", list), ("tuple", tuple), ("dict", dict), ("int", int), ("str", str)):
            if isinstance(value, known):
                return kind in kinds.replace("(", " ").replace(")", " ").replace(",", " ").split()
        return False if value is None else Unknown("isinstance")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _as_load(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body
