"""Numbers of the engine that may be changed while it runs: found from a probed frame, set at a cycle's begin, put back.

A knob is data of the plan: the point whose frame leads to it, a path that ends in a plain attribute, and the allowed
range. Only a process whose plan has the knob open looks for it.
"""

from __future__ import annotations

import time
from _thread import RLock
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import layout
from .swap import Pair
from .writers import ours

EACH = "each"
Write = Callable[[int, int, int, int, int], None]


class CannotTurn(Exception):
    """Why a knob cannot be used in this process."""


class NotThere(CannotTurn):
    """The path does not lead to a number in this process."""


class Knob:
    """One knob of one process.

    ``shape`` ``int`` assigns the number itself, ``each`` a new list of as many entries as the engine's, all of them the
    number. ``wanted`` is None for the engine's own value. An assignment is one attribute of one object; the engine
    reads the old value or the new one, never a mixture. Only a number from ``low`` to ``most`` is set, or one of the
    list that ``among`` leads to; each path of ``alone`` must lead to 1: that many processes hold a number each.
    """

    def __init__(self, description: Mapping[str, Any], write: Write, news: Callable[[], None]) -> None:
        self.name = str(description["name"])
        self.reason = ""
        self.wanted: Optional[int] = None
        self.pending = False
        self.turns = 0
        self.met = False
        self._each = description["shape"] == EACH
        self._low = int(description.get("low") or 0)
        self._most: Any = description.get("most")
        self._among = description.get("among")
        self._alone = list(description.get("alone") or [])
        self._allowed: Optional[List[int]] = None
        self._hint = str(description.get("hint") or "")
        self._path = _steps(str(description["path"]))
        self._look = True
        self._holder: Any = None
        self._original: Any = None
        self._range = (0, 0)
        self._write = write
        self._news = news
        self._lock = RLock()

    def wrapped(self, roots: Sequence[Sequence[Any]], pair: Pair) -> Pair:
        """The point's functions with the knob: turned as the call begins, found and looked at again as it ends."""
        begin, end = pair
        known = {root[0]: root for root in roots}

        def turning_begin() -> int:
            try:
                if self.pending:
                    self._turn()
            except Exception as error:
                if not ours(error):
                    raise
                self._fail(error)
            return begin()

        def finding_end(t0: int, result: Any, id: int, thread: Any = None, *handed: Any) -> Any:
            end(t0, result, id, thread, *handed)
            try:
                if self._look:
                    self._find(known, handed, result)
            except Exception as error:
                if not ours(error):
                    raise
                self._fail(error)
            return result

        return turning_begin, finding_end

    def want(self, number: Optional[int]) -> None:
        """Have the engine's thread set ``number`` at its next cycle; None puts the engine's own value back at once."""
        with self._lock:
            self.wanted = number
            if number is None:
                self._put_back()
            self._look = not self.met and not self.reason
            self.pending = number is not None and not self.reason and self.met

    def renew(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self._lock = RLock()

    def describe(self) -> Dict[str, Any]:
        """What the report tells: ``value`` is read back from the engine now, an int or the distinct ints in order."""
        return {
            "name": self.name,
            "met": self.met,
            "reason": self.reason,
            "wanted": self.wanted,
            "pending": self.pending or self._look,
            "value": _plain(self._read()) if self.met else None,
            "original": _plain(self._original),
            "range": list(self._range) if self.met else None,
            "turns": self.turns,
        }

    # -- in the engine's thread -----------------------------------------------------------------------------------

    def _find(self, known: Mapping[str, Sequence[Any]], handed: Sequence[Any], result: Any) -> None:
        """Find the number; after each turn make sure that it still is where it was, with the value that was set."""
        with self._lock:
            root, *steps = self._path[:-1]
            holder = _walk(_start(known[str(root)], handed, result), steps)
            if not self.met:
                self._take(holder, known, handed, result)
            elif holder is not self._holder or self._changed():
                raise CannotTurn("the engine has put another one in its place")
            self._look = False
            self.pending = self.wanted is not None and _plain(self._read()) != self.wanted
        self._news()

    def _changed(self) -> bool:
        """Whether the number is not the one that was set, unless the control thread has asked for another meanwhile."""
        return self.wanted is not None and not self.pending and _plain(self._read()) != self.wanted

    def _take(self, holder: Any, known: Mapping[str, Sequence[Any]], handed: Sequence[Any], result: Any) -> None:
        kind, name = type(holder).__name__, str(self._path[-1])
        # A property or a slot would run code of the engine's.
        if name not in _space(holder) or hasattr(_static(type(holder), name), "__set__"):
            raise CannotTurn(f"{kind} has no attribute {name} of its own")
        value = _space(holder)[name]
        if value is None:
            raise NotThere(f"{kind}.{name} is None")
        fits = (
            type(value) is list and value and all(type(x) is int for x in value) if self._each else type(value) is int
        )
        if not fits:
            raise CannotTurn(f"{kind}.{name} is no {'list of ints' if self._each else 'int'}")
        for path in self._alone:
            count = _lead(path, known, handed, result)
            if count != 1:
                raise CannotTurn(
                    f"{path} is {count}: each of these processes keeps a number of its own, and all would have to "
                    "change before one and the same cycle"
                )
        self._range = self._limits(known, handed, result)
        self._holder, self._original, self.met = holder, value, True

    def _limits(self, known: Mapping[str, Sequence[Any]], handed: Sequence[Any], result: Any) -> Tuple[int, int]:
        if self._among:
            allowed = _lead(self._among, known, handed, result)
            if type(allowed) is not list or not allowed or any(type(x) is not int for x in allowed):
                raise CannotTurn(f"the numbers to choose from, {self._among}, are no list of ints")
            self._allowed = allowed
            return min(allowed), max(allowed)
        most = _lead(self._most, known, handed, result) if isinstance(self._most, str) else self._most
        if type(most) is not int:
            raise CannotTurn(f"its largest value, {self._most}, is no int")
        return self._low, most

    def _turn(self) -> None:
        with self._lock:
            number = self.wanted
            if not self.pending or number is None:
                return
            self.pending = False
            low, most = self._range
            if not low <= number <= most:
                raise CannotTurn(f"{number} lies outside {low}..{most}")
            if self._allowed is not None and number not in self._allowed:
                raise CannotTurn(f"{number} is none of {', '.join(map(str, self._allowed))}")
            _space(self._holder)[str(self._path[-1])] = [number] * len(self._original) if self._each else number
            self.turns += 1
            self._look = True
        now = time.perf_counter_ns()
        self._write(layout.KIND_MARK, layout.POINT_KNOB, now, now, number)

    def _fail(self, error: Exception) -> None:
        """The engine's own value is put back, and the knob is left alone from now on."""
        try:
            with self._lock:
                self.reason = str(error) if isinstance(error, CannotTurn) else f"{type(error).__name__}: {error}"
                if isinstance(error, NotThere) and self._hint:
                    self.reason += f": {self._hint}"
                self.pending = self._look = False
                self._put_back()
            self._news()
        except Exception:
            pass  # the server comes first

    # -- from any thread ------------------------------------------------------------------------------------------

    def _put_back(self) -> None:
        if self.met and self._read() is not self._original:
            _space(self._holder)[str(self._path[-1])] = self._original
            self.turns += 1

    def _read(self) -> Any:
        return _space(self._holder).get(str(self._path[-1]))


class Knobs:
    """The open knobs of one process."""

    def __init__(self, plan: Mapping[str, Any], write: Write, news: Callable[[], None]) -> None:
        self._by_point: Dict[int, List[Knob]] = {}
        self.knobs: List[Knob] = []
        for description in plan.get("knobs") or []:
            if description.get("open"):
                knob = Knob(description, write, news)
                self.knobs.append(knob)
                for id in description["points"]:
                    self._by_point.setdefault(int(id), []).append(knob)

    def wrapped(self, point: Mapping[str, Any], roots: Sequence[Sequence[Any]], pair: Pair) -> Pair:
        """The begin and end of ``point``, with the knobs that are turned there."""
        for knob in self._by_point.get(int(point["id"]), []):
            pair = knob.wrapped(roots, pair)
        return pair

    def want(self, wanted: Mapping[str, Any]) -> None:
        """Set what ``link.json`` wants; a knob that is not named goes back to the engine's own value."""
        for knob in self.knobs:
            number = wanted.get(knob.name)
            knob.want(number if type(number) is int else None)

    def renew(self) -> None:
        """In a forked child: new locks."""
        for knob in self.knobs:
            knob.renew()

    def describe(self) -> List[Dict[str, Any]]:
        """All knobs, for the report."""
        return [knob.describe() for knob in self.knobs]


def _steps(path: str) -> List[Union[str, int]]:
    """The root, then names of attributes and numbers of items, in order."""
    words = path.replace("[", ".[").split(".")
    if words[0] == "kw":
        words[:2] = [".".join(words[:2])]
    return [int(word[1:-1]) if word.startswith("[") else word for word in words]


def _lead(path: str, known: Mapping[str, Sequence[Any]], handed: Sequence[Any], result: Any) -> Any:
    """What a path leads to."""
    root, *rest = _steps(path)
    return _walk(_start(known[str(root)], handed, result), rest)


def _start(entry: Sequence[Any], handed: Sequence[Any], result: Any) -> Any:
    return _walk(handed[entry[1]] if entry[1] >= 0 else result, entry[2:])


def _walk(value: Any, steps: Sequence[Union[str, int]]) -> Any:
    """Follow the steps without running any code of the engine's: attributes of the objects' own, items of lists."""
    for step in steps:
        if isinstance(step, str):
            if value is None:
                raise NotThere(f"what should have the attribute {step} is None")
            if step not in _space(value):
                raise CannotTurn(f"{type(value).__name__} has no attribute {step} of its own")
            value = _space(value)[step]
        elif type(value) is dict and step not in value:
            raise NotThere(f"a dict on the way has no item {step}")
        elif type(value) in (list, tuple, dict):
            value = value[step]
        else:
            raise CannotTurn(f"item {step} of a {type(value).__name__} cannot be looked up")
    return value


def _space(value: Any) -> Dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _static(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _plain(value: Any) -> Any:
    """An int, or the distinct ints of a list in order; None for anything else."""
    if type(value) is list and all(type(item) is int for item in value):
        distinct = sorted(set(value))
        return distinct[0] if len(distinct) == 1 else distinct
    return value if type(value) is int else None
