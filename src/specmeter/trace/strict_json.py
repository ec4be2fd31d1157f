"""JSON from outside: only what every reader of it can work with and write again.

RFC 8259 lets numbers be of any size and documents of any depth. Python's reader makes 1e999 an infinity, which is no
number to whatever computes with it or writes it again, and integers that no float holds; a document that it can just
read may be too deep for the code that walks it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

from specmeter.trace.regular import open_regular

MOST_DEEP = 100
_LEAST_INTEGER, _MOST_INTEGER = -(1 << 63), (1 << 64) - 1
_MOST_DIGITS = len(str(_LEAST_INTEGER))


def parse_json(raw: bytes | str) -> Any:
    """The document of a JSON text.

    Raises ValueError, which says why, for text that is no JSON, for NaN, infinities and numbers beyond a float, for
    integers of more than 64 bits, and for documents nested more than MOST_DEEP deep.
    """
    try:
        document = json.loads(raw, parse_constant=_constant, parse_float=_float, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEEP} deep") from None
    if _deeper(document, MOST_DEEP):
        raise ValueError(f"it is nested more than {MOST_DEEP} deep")
    return document


def read_json(path: Path, most_bytes: int) -> Any:
    """The document of a regular file (also .gz) of at most ``most_bytes``, unpacked.

    Raises OSError for what cannot be read or is no regular file, ValueError as ``parse_json`` does and for more bytes.
    """
    try:
        with (
            open_regular(path) as file,
            gzip.open(file) if path.suffix == ".gz" else contextlib.nullcontext(file) as opened,
        ):
            raw = opened.read(most_bytes + 1)  # a few packed bytes can stand for any number
    except (EOFError, zlib.error) as error:
        raise ValueError(f"it cannot be unpacked: {error}") from error
    if len(raw) > most_bytes:
        raise ValueError(f"it is larger than {_size(most_bytes)}")
    return parse_json(raw)


def _size(count: int) -> str:
    return f"{count / (1 << 30):g} GiB" if count >= 1 << 30 else f"{count / (1 << 20):g} MiB"


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {_short(text)} is beyond what a float holds")
    return value


def _integer(text: str) -> int:
    # The length first: Python refuses thousands of digits with advice that is of no use here.
    if len(text) > _MOST_DIGITS or not _LEAST_INTEGER <= int(text) <= _MOST_INTEGER:
        raise ValueError(f"the integer {_short(text)} is beyond 64 bits")
    return int(text)


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:12]}... of {len(text)} characters"


def _deeper(document: object, most: int) -> bool:
    """Whether lists and objects lie inside one another more than ``most`` deep; without recursion."""
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return bool(level)
