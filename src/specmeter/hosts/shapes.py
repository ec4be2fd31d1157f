"""What the far side may send: the shapes of its answers, errors and events. Nothing is used before it is checked.

A far host may be broken or hostile. What comes from there ends at worst in one plain error with exit 4 that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.frames import Message, StreamDamaged
from specmeter.trace.plan import index_plan

Check = Callable[[Any], bool]
_MOST = 1 << 62  # of moments in ns and of counts: two of them can still be added in 64 bits


def sent(what: str, why: str = "") -> SpecmeterError:
    """The error for something that no specmeter would send."""
    step = "Look at what --on names, and at what stands between: something changes the stream."
    return SpecmeterError(f"The far side sent {what}.", why, step, Exit.SERVER_FAILED)


def check_frame(message: Message) -> None:
    """Every message is an answer to a number or an event with a name. Raises StreamDamaged."""
    fine = _integer(message["id"]) if "id" in message else isinstance(message.get("event"), str)
    if not fine:
        fields = [f"{key[:20]}: {_shown(value)}" for key, value in list(message.items())[:2]]
        raise StreamDamaged("{{{}}}".format(", ".join(fields)).encode("utf-8", "replace"))


def check_answer(op: str, answer: Any) -> None:
    """Raises SpecmeterError for an answer to ``op`` without the fields that are read, or with others' kinds in them."""
    shape = ANSWERS.get(op, {})
    if op == "http" and isinstance(answer, dict) and "failed" in answer:
        shape = _FAILED
    _check(f"a malformed answer to {op!r}", answer, shape)


def check_event(message: Message) -> None:
    """The same for an event."""
    name = str(message["event"])
    _check(f"a malformed {name[:40]!r} event", message, EVENTS.get(name, {}))


def checked_plan(described: Mapping[str, Any]) -> None:
    """Raises SpecmeterError where the plan of a described link cannot be used."""
    try:
        index_plan(described["plan"])
    except (SpecmeterError, OverflowError) as error:
        why = error.why if isinstance(error, SpecmeterError) else str(error)
        raise sent(f"a plan of link {described['link']} that cannot be used", why) from None


def far_error(error: Any) -> SpecmeterError:
    """An error of the far side as one of ours. Its exit code stays where it is a documented failure, else it is 4."""
    if not isinstance(error, dict) or not all(isinstance(error.get(key), str) for key in ("what", "why", "next")):
        return sent("an error without words")
    code: Any = error.get("exit")
    exit = Exit.SERVER_FAILED
    if _integer(code) and Exit.FINDING <= code <= Exit.ENVIRONMENT:
        exit = Exit(code)
    return SpecmeterError(error["what"], error["why"], error["next"], exit)


def _check(name: str, found: Any, shape: Mapping[str, Check]) -> None:
    if not isinstance(found, dict):
        raise sent(name, f"It is {_shown(found)}.")
    for key, fits in shape.items():
        if key not in found:
            raise sent(name, f"It has no {key!r}.")
        if not fits(found[key]):
            raise sent(name, f"Its {key!r} is {_shown(found[key])}.")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:80])
    return repr(value)[:80] if value is None or isinstance(value, (int, float)) else f"a {type(value).__name__}"


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MOST < value < _MOST


def _count(value: Any) -> bool:
    return _integer(value) and value >= 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _maybe(fits: Check) -> Check:
    return lambda value: value is None or fits(value)


def _all(fits: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _each(fits: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _link_id(value: Any) -> bool:
    """As ``control.link.checked_id`` allows them: it becomes no path here, and is shown and stored."""
    letters = isinstance(value, str) and all(letter.isalnum() or letter in "-_." for letter in value)
    return letters and 0 < len(value) < 256 and not value.startswith(".")


def _described(value: Any) -> bool:
    return isinstance(value, dict) and all(key in value and fits(value[key]) for key, fits in _DESCRIBED.items())


_DESCRIBED: dict[str, Check] = {"link": _link_id, "path": _text, "plan": _mapping, "document": _mapping}
_ARMED: dict[str, Check] = {"silent": _all(_count), "done": _count}
_FAILED: dict[str, Check] = {"failed": _text, "timeout": _flag}
ANSWERS: dict[str, dict[str, Check]] = {
    "ping": {"perf_counter_ns": _integer, "time_ns": _integer},
    "facts": {"host": _text, "system": _text, "machine": _text, "cpus": _maybe(_count), "python": _text},
    "busy": {"warning": _maybe(_text)},
    "prepare": _DESCRIBED,
    "find": _DESCRIBED,
    "links": {"links": _all(_described)},
    "collect": {"lost": _count},
    "arm": _ARMED,
    "disarm": _ARMED,
    "deep": {
        "number": _count,
        "activity": _text,
        "done": _all(_count),
        "failed": lambda value: _each(_text)(value) and all(map(str.isdecimal, value)),
        "left_out": lambda value: _each(_text)(value) and all(map(str.isdecimal, value)),
        "notes": _all(_text),
    },
    "deep_file": {"start": _count},
    "start": {"pid": _count, "secrets": _all(lambda value: isinstance(value, str) and value != "")},
    "port": {"port": lambda value: _count(value) and 0 < value < 1 << 16},
    "stop": {"code": _maybe(_integer)},
    "variables": {"found": _each(_text)},
    "flags": {"choices": _each(_all(_text)), "source": _text, "version": _maybe(_text), "fields": _all(_text)},
    "http": {
        "status": lambda value: _count(value) and 100 <= value <= 999,
        "headers": _all(lambda pair: isinstance(pair, list) and len(pair) == 2 and all(map(_text, pair))),
    },
    "drive": {"wall_s": _amount, "cpu_share": _amount, "full_ns": _maybe(_integer)},
}
EVENTS: dict[str, dict[str, Check]] = {
    "process": {"link": _text, "name": _text, "alive": _flag},
    "ring": {"link": _text, "name": _text},
    "records": {"link": _text, "name": _text, "lost": _count},
    "outcome": {
        "drive": _count,
        "index": _count,
        "send_ns": _integer,
        "end_ns": _integer,
        "arrivals_ns": _all(_integer),
        "status": _count,
        "problem": _text,
    },
    "log": {"server": _count},
    "exited": {"server": _count, "code": _integer},
}
