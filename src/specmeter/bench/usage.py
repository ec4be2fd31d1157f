"""What a server says of one request in its answer: each count is checked before anything is computed from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_TOKENS = 10**12  # no request has more; sums of such counts, and rates of them, are still exact


class StreamError(Exception):
    """The server's answer cannot be used, with the reason in words."""


@dataclass(frozen=True)
class Usage:
    """The server's own counts of one request, in tokens and cycles; None where it says nothing."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    cycles: int | None = None
    accepted: int | None = None
    per_position: tuple[int, ...] = ()


def usage_of(said: object) -> Usage:
    """What a usage object says. Raises StreamError naming the field that is not what it should be."""
    usage = _fields(said, "usage")
    details = _fields(usage.get("prompt_tokens_details") or {}, "usage.prompt_tokens_details")
    own = _fields(usage.get("specmeter") or {}, "usage.specmeter")
    each = own.get("accepted_per_position") or []
    if not isinstance(each, list):
        raise _not("usage.specmeter.accepted_per_position", each, "a list")
    return Usage(
        prompt=_count(usage, "prompt_tokens"),
        cached=_count(details, "cached_tokens"),
        output=_count(usage, "completion_tokens"),
        cycles=_count(own, "cycles"),
        accepted=_count(own, "accepted"),
        per_position=tuple(_count({"accepted_per_position": value}, "accepted_per_position") or 0 for value in each),
    )


def _fields(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _not(name, value, "an object")
    return value


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise _not(name, value, "a count")
    return value


def checked_text(value: object) -> str:
    """``value``, if it is text. Raises StreamError for anything else."""
    if not isinstance(value, str):
        raise _not("a piece of text", value, "text")
    return value


def _not(name: str, value: object, wanted: str) -> StreamError:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return StreamError(f"the answer is malformed: {name} is {shown}, not {wanted}")


def refusal(status: int, body: bytes) -> str:
    """What an answer of another status than 200 says."""
    try:
        return f"HTTP {status}: {error_message(json.loads(body))}"
    except (ValueError, TypeError, RecursionError):
        return f"HTTP {status}: {body[:200].decode('utf-8', 'replace').strip()}"


def error_message(document: Any) -> str:
    """The text of an error object in any of the shapes that servers use."""
    error = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:300]
