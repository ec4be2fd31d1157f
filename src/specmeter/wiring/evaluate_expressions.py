"""Expressions of the evaluator (see evaluate.py)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from specmeter.wiring.evaluate_values import (
    COMPARISONS,
    METHODS,
    OPERATORS,
    Bound,
    Instance,
    Raised,
    Undecided,
    Unknown,
    as_items,
    guarded,
    is_true,
)

if TYPE_CHECKING:  # a check runs on hosts with a Python of 3.9 too
    from typing import TypeGuard

MAX_STEPS = 200_000
# A check looks at one pipeline stage that holds the whole model.
_TRUE_ATTRIBUTES = ("is_last_rank", "is_first_rank")


class Expressions:
    """Evaluates expressions; ``hook`` may supply attributes of unknown values (None: no opinion).

    ``stored`` are the attributes that code assigned on unknown objects, by attribute name.
    """

    def __init__(self, hook: Callable[[str], object] | None = None) -> None:
        self._hook = hook or (lambda name: None)
        self._steps = 0
        self.stored: dict[str, object] = {}

    def step(self) -> None:
        """Count a step; endless code is given up."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Undecided("the code takes too many steps")

    def store(self, target: ast.expr, value: object, names: dict[str, object]) -> None:
        """Assign ``value`` to a target expression."""
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.set_attribute(self.value(target.value, names), target.attr, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            items: list[object] = [Unknown()] * len(target.elts)
            if not isinstance(value, Unknown):
                items = list(as_items(value, target.lineno))
            for part, item in zip(target.elts, items):  # noqa: B905 (3.9)
                self.store(part, item, names)
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value, names), self.value(target.slice, names)
            if isinstance(owner, (list, dict)):
                guarded(target.lineno, lambda: owner.__setitem__(key, value))  # type: ignore[call-overload]
        else:
            raise Undecided(f"line {target.lineno}: assignment to {type(target).__name__}")

    def set_attribute(self, owner: object, name: str, value: object) -> None:
        """Assign an attribute, as an assignment or setattr() would."""
        if isinstance(owner, Instance):
            owner.fields[name] = value
            owner.written.add(name)
        else:
            self.stored[name] = value

    def truth(self, node: ast.expr, names: dict[str, object]) -> bool:
        """The truth of an expression; an unknown value counts as true."""
        return is_true(self.value(node, names))

    def value(self, node: ast.expr, names: dict[str, object]) -> object:
        """The value of an expression."""
        self.step()
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            return Unknown(type(node).__name__)
        result: object = method(node, names)
        return result

    def _constant(self, node: ast.Constant, names: dict[str, object]) -> object:
        return node.value

    def _name(self, node: ast.Name, names: dict[str, object]) -> object:
        return names.get(node.id, Unknown(node.id))

    def _attribute(self, node: ast.Attribute, names: dict[str, object]) -> object:
        return self.get_attribute(self.value(node.value, names), node.attr, node.lineno)

    def get_attribute(self, owner: object, name: str, line: int) -> object:
        """Read an attribute; a missing one of a closed object or a plain value raises AttributeError."""
        if isinstance(owner, Instance):
            if name in owner.fields:
                return owner.fields[name]
            if owner.view is not None:
                function = owner.view.method(name)
                if function is not None:
                    return Bound(owner, name, function)
                known = owner.view.attribute(name)
                if known is not None:
                    owner.fields[name] = known
                    return known
            if owner.closed:
                raise Raised("AttributeError", name, line)
            return self._unknown_attribute(name)
        if isinstance(owner, Unknown):
            return self.stored.get(name, self._unknown_attribute(name))
        if isinstance(owner, (list, dict, tuple, str, set)) and name in METHODS:
            return Bound(owner, name)
        raise Raised("AttributeError", f"{type(owner).__name__}.{name}", line)

    def _unknown_attribute(self, name: str) -> object:
        if name in _TRUE_ATTRIBUTES:
            return True
        given = self._hook(name)
        return Unknown(name) if given is None else given

    def _subscript(self, node: ast.Subscript, names: dict[str, object]) -> object:
        owner = self.value(node.value, names)
        if isinstance(owner, (Unknown, Instance)):
            return Unknown("item")
        if isinstance(node.slice, ast.Slice):
            low, high = (None if p is None else self.value(p, names) for p in (node.slice.lower, node.slice.upper))
            if not (_is_bound(low) and _is_bound(high)):
                return Unknown("slice")
            return owner[low:high] if isinstance(owner, (list, tuple, str)) else Unknown("slice")
        key = self.value(node.slice, names)
        return guarded(node.lineno, lambda: owner[key])  # type: ignore[index]

    def _list(self, node: ast.List, names: dict[str, object]) -> object:
        return self._items(node.elts, names)

    def _tuple(self, node: ast.Tuple, names: dict[str, object]) -> object:
        return tuple(self._items(node.elts, names))

    def _set(self, node: ast.Set, names: dict[str, object]) -> object:
        return set(self._items(node.elts, names))

    def _items(self, nodes: list[ast.expr], names: dict[str, object]) -> list[object]:
        items: list[object] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                inner = self.value(node.value, names)
                items.extend([inner] if isinstance(inner, Unknown) else as_items(inner, node.lineno))
            else:
                items.append(self.value(node, names))
        return items

    def _dict(self, node: ast.Dict, names: dict[str, object]) -> object:
        pairs = zip(node.keys, node.values)  # noqa: B905 (3.9)
        return {self.value(key, names): self.value(value, names) for key, value in pairs if key is not None}

    def _listcomp(self, node: ast.ListComp, names: dict[str, object]) -> object:
        return self._comprehension(node, names)

    def _generatorexp(self, node: ast.GeneratorExp, names: dict[str, object]) -> object:
        return self._comprehension(node, names)

    def _setcomp(self, node: ast.SetComp, names: dict[str, object]) -> object:
        items = self._comprehension(node, names)
        return set(items) if isinstance(items, list) else items

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, names: dict[str, object]) -> object:
        results: list[object] = []
        known = self._generate(node.generators, dict(names), lambda inner: results.append(self.value(node.elt, inner)))
        return results if known else Unknown("comprehension")

    def _generate(
        self, generators: list[ast.comprehension], names: dict[str, object], emit: Callable[[dict[str, object]], None]
    ) -> bool:
        first, rest = generators[0], generators[1:]
        items = self.value(first.iter, names)
        if isinstance(items, Unknown):
            return False
        for item in as_items(items, first.iter.lineno):
            self.store(first.target, item, names)
            if all(self.truth(test, names) for test in first.ifs):
                if not rest:
                    emit(names)
                elif not self._generate(rest, names, emit):
                    return False
        return True

    def _binop(self, node: ast.BinOp, names: dict[str, object]) -> object:
        left, right = self.value(node.left, names), self.value(node.right, names)
        operate = OPERATORS.get(type(node.op))
        if operate is None or isinstance(left, (Unknown, Instance)) or isinstance(right, (Unknown, Instance)):
            return Unknown("arithmetic")
        if isinstance(node.op, ast.Mult) and not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            return Unknown("repetition")
        return guarded(node.lineno, lambda: operate(left, right))

    def _unaryop(self, node: ast.UnaryOp, names: dict[str, object]) -> object:
        operand = self.value(node.operand, names)
        if isinstance(node.op, ast.Not):
            return not is_true(operand)
        if isinstance(node.op, ast.USub) and isinstance(operand, int):
            return -operand
        return Unknown("unary")

    def _boolop(self, node: ast.BoolOp, names: dict[str, object]) -> object:
        stop_at = isinstance(node.op, ast.Or)
        value: object = None
        for part in node.values:
            value = self.value(part, names)
            if is_true(value) is stop_at:
                return value
        return value

    def _ifexp(self, node: ast.IfExp, names: dict[str, object]) -> object:
        return self.value(node.body if self.truth(node.test, names) else node.orelse, names)

    def _compare(self, node: ast.Compare, names: dict[str, object]) -> object:
        left = self.value(node.left, names)
        for operator, right_node in zip(node.ops, node.comparators):  # noqa: B905 (3.9)
            right = self.value(right_node, names)
            compare = COMPARISONS[type(operator)]
            if isinstance(operator, (ast.Is, ast.IsNot)):
                if not compare(left, right):
                    return False
            elif isinstance(left, (Unknown, Instance)) or isinstance(right, (Unknown, Instance)):
                return Unknown("comparison")
            elif not guarded(node.lineno, lambda: compare(left, right)):  # noqa: B023
                return False
            left = right
        return True

    def _joinedstr(self, node: ast.JoinedStr, names: dict[str, object]) -> object:
        return Unknown("text")

    def _namedexpr(self, node: ast.NamedExpr, names: dict[str, object]) -> object:
        value = self.value(node.value, names)
        names[node.target.id] = value
        return value

    def _call(self, node: ast.Call, names: dict[str, object]) -> object:
        raise NotImplementedError


def _is_bound(value: object) -> TypeGuard[int | None]:
    return value is None or isinstance(value, int)
