"""Numbers of the engine that may be changed while it runs: found from a probed frame, set at a cycle's begin, put back.

A knob is data of the plan: the point whose frame leads to it, a path that ends in a plain attribute, and the allowed
range. Only a process whose plan has the knob open looks for it.
"""

from __future__ import annotations

import time
from _thread import RLock
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from . import layout
from .swap import Pair
from .values import NotAPlainValue, compile_path, integers

EACH = "each"
Write = Callable[[int, int, int, int, int], None]
Place = Tuple[str, List[Any], str]  # root, steps to the object that holds the attribute, its name


class CannotTurn(Exception):
    """Why a knob cannot be used in this process."""


class Knob:
    """One knob of one process.

    ``shape`` ``int`` assigns the number itself, ``each`` a new list of as many entries as the engine's, all of them the
    number. ``wanted`` is None for the engine's own value. An assignment is one attribute of one object; the engine
    reads the old value or the new one, never a mixture.
    """

    def __init__(self, description: Mapping[str, Any], write: Write, news: Callable[[], None]) -> None:
        self.name = str(description["name"])
        self.reason = ""
        self.wanted: Optional[int] = None
        self.pending = False
        self.turns = 0
        self.met = False
        self._each = description["shape"] == EACH
        self._low = int(description["low"])
        self._most: Any = description["most"]
        self._hint = str(description.get("hint") or "")
        self._place = _place(str(description["path"]))
        self._holder: Any = None
        self._original: Any = None
        self._range = (0, 0)
        self._write = write
        self._news = news
        self._lock = RLock()

    def wrapped(self, roots: Sequence[Sequence[Any]], pair: Pair) -> Pair:
        """The point's functions with the knob: turned as the call begins, found as the first one ends."""
        begin, end = pair
        known = {root[0]: root for root in roots}

        def turning_begin() -> int:
            if self.pending:
                self._turn()
            return begin()

        def finding_end(t0: int, result: Any, id: int, *handed: Any) -> Any:
            end(t0, result, id, *handed)
            if not self.met and not self.reason:
                self._meet(known, handed, result)
            return result

        return turning_begin, finding_end

    def want(self, number: Optional[int]) -> None:
        """Have the engine's thread set ``number`` at its next cycle; None puts the engine's own value back at once."""
        with self._lock:
            self.wanted = number
            if number is None:
                self._put_back()
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
            "pending": self.pending,
            "value": _plain(self._read()) if self.met else None,
            "original": _plain(self._original),
            "range": list(self._range) if self.met else None,
            "turns": self.turns,
        }

    # -- in the engine's thread -----------------------------------------------------------------------------------

    def _meet(self, known: Mapping[str, Sequence[Any]], handed: Sequence[Any], result: Any) -> None:
        try:
            with self._lock:
                self._find(known, handed, result)
                self.met = True
                self.pending = self.wanted is not None
        except Exception as error:
            self._fail(error)
        self._news()

    def _find(self, known: Mapping[str, Sequence[Any]], handed: Sequence[Any], result: Any) -> None:
        root, steps, name = self._place
        holder = _walk(_start(known[root], handed, result), steps)
        # Neither a property nor a slot: setting it must run no code of the engine's.
        if name not in getattr(holder, "__dict__", {}):
            raise CannotTurn(f"{type(holder).__name__} has no attribute {name} of its own")
        if hasattr(type(holder), name) and hasattr(type(getattr(type(holder), name)), "__set__"):
            raise CannotTurn(f"{type(holder).__name__}.{name} is set by code of the engine's")
        value = holder.__dict__[name]
        if value is None:
            raise CannotTurn(f"{type(holder).__name__}.{name} is None" + (f": {self._hint}" if self._hint else ""))
        fits = (
            type(value) is list and value and all(type(x) is int for x in value) if self._each else type(value) is int
        )
        if not fits:
            raise CannotTurn(f"{type(holder).__name__}.{name} is no {'list of ints' if self._each else 'int'}")
        most = self._most
        if isinstance(most, str):
            start, rest = compile_path(most)
            most = integers(_walk(_start(known[start], handed, result), rest))[0]
        self._holder, self._original, self._range = holder, value, (self._low, int(most))

    def _turn(self) -> None:
        try:
            with self._lock:
                if not self.pending or self.wanted is None:
                    return
                self.pending = False
                low, most = self._range
                if not low <= self.wanted <= most:
                    raise CannotTurn(f"{self.wanted} lies outside {low}..{most}")
                value = [self.wanted] * len(self._original) if self._each else self.wanted
                self._holder.__dict__[self._place[2]] = value
                self.turns += 1
                number = self.wanted
            now = time.perf_counter_ns()
            self._write(layout.KIND_MARK, layout.POINT_KNOB, now, now, number)
        except Exception as error:
            self._fail(error)
        self._news()

    def _fail(self, error: Exception) -> None:
        """The engine's own value is put back, and the knob is left alone from now on."""
        try:
            with self._lock:
                self.reason = str(error) if isinstance(error, CannotTurn) else f"{type(error).__name__}: {error}"
                self.pending = False
                self._put_back()
        except Exception:
            pass  # the server comes first

    # -- from any thread ------------------------------------------------------------------------------------------

    def _put_back(self) -> None:
        if self.met and self._read() is not self._original:
            self._holder.__dict__[self._place[2]] = self._original
            self.turns += 1

    def _read(self) -> Any:
        return getattr(self._holder, "__dict__", {}).get(self._place[2])


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


def _place(path: str) -> Place:
    before, _, name = path.rpartition(".")
    root, steps = compile_path(before)
    return root, steps, name


def _start(entry: Sequence[Any], handed: Sequence[Any], result: Any) -> Any:
    value = handed[entry[1]] if entry[1] >= 0 else result
    for name in entry[2:]:
        value = getattr(value, name)
    return value


def _walk(value: Any, steps: Sequence[Callable[[Any], Any]]) -> Any:
    for step in steps:
        value = step(value)
    return value


def _plain(value: Any) -> Any:
    try:
        distinct = sorted(set(integers(value)))
    except NotAPlainValue:
        return None
    return distinct[0] if len(distinct) == 1 else distinct
