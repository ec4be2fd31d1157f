"""Value paths, compiled to getters. Only ints and lists of ints that already are on the host are taken."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import layout

MAX_ITEMS = 4096
_PLAIN = (list, tuple, dict)
Step = Callable[[Any], Any]


class NotAPlainValue(Exception):
    """What a path led to is no host integer or list of them (a device tensor, say): it is not read, only counted."""


GET_ERRORS = (NotAPlainValue, AttributeError, LookupError, TypeError)


# One value of a point: its record's third word without cycle and lane, and where it is read (``handed``: the index of
# the name handed to the probe, -1 for the call's result; ``get`` None: what was handed over); ``optional``: a call
# that gave None gave no value; ``counts``: it is the engine's own number of its cycle. A plain tuple: CPython unpacks
# one in a single step, a named one by an iterator, and a value is read with cold caches.
Getter = Tuple[int, int, Optional[Step], bool, bool]


def getters_of(point: Dict[str, Any], roots: Sequence[Sequence[Any]], value_ids: Dict[str, int]) -> List[Getter]:
    """The getters of a plan's point, whose ``roots`` say what the rewritten code hands over. Raises ValueError."""
    known = {root[0]: root for root in roots}
    getters = []
    for name, path in (point.get("values") or {}).items():
        root, steps = compile_path(path)
        _root, index, *attributes = known[root]
        word = layout.KIND_VALUE << layout.KIND_SHIFT | value_ids[f"{point['name']}.{name}"] << layout.POINT_SHIFT
        get = _chained([attrgetter(".".join(attributes))] * bool(attributes) + steps)
        getters.append((word, index, get, not attributes, name == "iteration" and point.get("role") == "cycle"))
    return getters


def _chained(steps: List[Step]) -> Optional[Step]:
    if len(steps) < 2:
        return steps[0] if steps else None
    if len(steps) == 2:
        inner, outer = steps
        return lambda root: outer(inner(root))

    def get(root: Any) -> Any:
        for step in steps:
            root = step(root)
        return root

    return get


def compile_path(path: str) -> Tuple[str, List[Step]]:
    """Split a path into its root (``return``, ``self``, ``argN``, ``kw.NAME``) and the steps after it.

    Raises ValueError where the path breaks the grammar ``.attr``, ``[3]``, ``["key"]``, ``|len``, ``|sum``.
    """
    body, *filters = path.split("|")
    root, rest = _split_root(body)
    steps: List[Step] = []
    while rest:
        if rest.startswith("["):
            inside, closed, rest = rest[1:].partition("]")
            if not closed:
                raise ValueError(f"unclosed bracket in {path!r}")
            steps.append(_item(_index(inside, path)))
        else:
            end = min([at for at in (rest.find(".", 1), rest.find("[", 1)) if at > 0], default=len(rest))
            name = rest[1:end]
            if rest[0] != "." or not name.isidentifier():
                raise ValueError(f"bad path {path!r}")
            steps.append(attrgetter(name))
            rest = rest[end:]
    for word in filters:
        if word not in ("len", "sum"):
            raise ValueError(f"unknown filter {word!r} in {path!r}")
        steps.append(len if word == "len" else _total)
    return root, steps


def integers(value: Any) -> List[int]:
    """``value`` as a list of ints: an int, a list or tuple of ints, or a numpy array or scalar of integers."""
    kind = type(value)
    if kind is int or kind is bool:
        return [int(value)]
    if kind.__module__ == "numpy" and hasattr(value, "tolist") and getattr(value.dtype, "kind", "") in "iub":
        plain = value.tolist()
        return integers(plain)
    if isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS:
        if all(type(item) is int or type(item) is bool for item in value):
            return [int(item) for item in value]
        if value and all(type(item).__module__ == "numpy" and getattr(item, "ndim", 1) == 0 for item in value):
            return [integers(item)[0] for item in value]
    raise NotAPlainValue(f"a {kind.__module__}.{kind.__qualname__}")


def _split_root(body: str) -> Tuple[str, str]:
    if body.startswith("kw."):
        ends = [at for at in (body.find(".", 3), body.find("[", 3)) if at > 0]
    else:
        ends = [at for at in (body.find("."), body.find("[")) if at > 0]
    end = min(ends, default=len(body))
    root = body[:end]
    known = root in ("return", "self") or root.startswith("kw.") or (root[:3] == "arg" and root[3:].isdigit())
    if not known:
        raise ValueError(f"unknown root {root!r}")
    return root, body[end:]


def _index(text: str, path: str) -> Any:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"bad index [{text}] in {path!r}") from None


def _item(index: Any) -> Step:
    def get(value: Any) -> Any:
        if not isinstance(value, _PLAIN):
            raise NotAPlainValue(f"an item of a {type(value).__qualname__}")
        return value[index]

    return get


def _total(value: Any) -> Any:
    return sum(integers(value))
