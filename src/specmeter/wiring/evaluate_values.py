"""Values of the evaluator: unknowns, objects, and the few operations and builtins that evaluated code may use."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_ITEMS = 100_000


class Raised(Exception):
    """The evaluated code raises: ``kind`` is the exception's name, ``line`` where."""

    def __init__(self, kind: str, message: str = "", line: int = 0) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.line = line


class Undecided(Exception):
    """The evaluator meets syntax or a size it does not handle."""


@dataclass(frozen=True)
class Unknown:
    """A value that the evaluator knows nothing about."""

    name: str = "?"


class ClassView(Protocol):
    """What the evaluator asks about a class of the source tree."""

    def method(self, name: str, above: ast.FunctionDef | None = None) -> ast.FunctionDef | None:
        """The method of that name, bases included, or None; with ``above``, the one that super() finds from there."""

    def attribute(self, name: str) -> object:
        """A fresh value for ``self.name`` of an instance, or None when nothing is known about it."""


@dataclass(eq=False)
class Instance:
    """An object with known fields.

    ``closed`` means that a field not there is an AttributeError (a config); otherwise it is looked up in the class, and
    unknown after that. ``written`` are the names that the evaluated code assigned.
    """

    fields: dict[str, object] = field(default_factory=dict)
    view: ClassView | None = None
    closed: bool = False
    written: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Bound:
    """A method together with the object it is called on; ``function`` is None for a method of a plain value."""

    owner: object
    name: str
    function: ast.FunctionDef | None = None


def is_true(value: object) -> bool:
    """The truth of a value; unknown values and objects count as true."""
    return True if isinstance(value, (Unknown, Instance, Bound)) else bool(value)


def as_items(value: object, line: int) -> Sequence[object]:
    """The items of an iterable value. Raises Raised(TypeError) as Python would."""
    if isinstance(value, (list, tuple, range, set, dict, str)):
        if len(value) > MAX_ITEMS:
            raise Undecided(f"line {line}: too many items")
        return list(value)
    raise Raised("TypeError", f"{type(value).__name__} is not iterable", line)


def guarded(line: int, operate: Callable[[], object]) -> object:
    """Do an operation on plain values; Python's own errors become Raised."""
    try:
        return operate()
    except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError, AttributeError, OverflowError) as fault:
        raise Raised(type(fault).__name__, str(fault), line) from None


def bind(
    function: ast.FunctionDef,
    arguments: list[object],
    keywords: dict[str, object],
    value: Callable[[ast.expr], object],
) -> dict[str, object]:
    """Local variables of a call; ``value`` evaluates the defaults. Parameters that nothing fills are unknown."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    names: dict[str, object] = {p.arg: Unknown(p.arg) for p in [*parameters, *function.args.kwonlyargs]}
    defaults = function.args.defaults
    for parameter, default in zip(parameters[len(parameters) - len(defaults) :], defaults):  # noqa: B905 (3.9)
        names[parameter.arg] = value(default)
    for parameter, standard in zip(function.args.kwonlyargs, function.args.kw_defaults):  # noqa: B905 (3.9)
        if standard is not None:
            names[parameter.arg] = value(standard)
    if len(arguments) > len(parameters) and function.args.vararg is None:
        raise Raised("TypeError", f"{function.name}() takes {len(parameters)} arguments", function.lineno)
    for parameter, argument in zip(parameters, arguments):  # noqa: B905 (3.9)
        names[parameter.arg] = argument
    names.update({key: word for key, word in keywords.items() if key in names})
    return names


def _small_range(*bounds: int) -> range:
    made = range(*bounds)
    if len(made) > MAX_ITEMS:
        raise Undecided("a range of too many items")
    return made


def _get(table: dict[object, object], key: object, default: object = None) -> object:
    return table.get(key, default)


def _append(items: list[object], item: object) -> None:
    if len(items) >= MAX_ITEMS:
        raise Undecided("a list of too many items")
    items.append(item)


BUILTINS: dict[str, Callable[..., object]] = {
    "len": len, "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "sorted": sorted, "max": max,
    "min": min, "sum": sum, "any": any, "all": all, "int": int, "bool": is_true, "abs": abs, "str": str,
    "range": _small_range, "dict": dict, "reversed": lambda items: list(reversed(items)),
    "enumerate": lambda items, start=0: list(enumerate(items, start)),
    "zip": lambda *items: list(zip(*items)),  # noqa: B905 (3.9)
}  # fmt: skip

METHODS: dict[str, Callable[..., object]] = {
    "get": _get,
    "append": _append,
    "index": lambda items, item: items.index(item),
    "keys": lambda table: list(table.keys()),
    "values": lambda table: list(table.values()),
    "items": lambda table: list(table.items()),
    "add": lambda items, item: items.add(item),
    "copy": lambda items: items.copy(),
    "startswith": lambda text, start: text.startswith(start),
    "endswith": lambda text, end: text.endswith(end),
    "lower": lambda text: text.lower(),
}

OPERATORS: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.BitOr: operator.or_,
}  # fmt: skip

COMPARISONS: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
