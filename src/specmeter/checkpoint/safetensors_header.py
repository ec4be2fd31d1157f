"""A defensive reader of safetensors headers; tensor data is not read except for small tensors asked for by name.

The file format: 8 bytes little-endian header length n, n bytes of JSON ``{name: {dtype, shape, data_offsets}}`` with
an optional ``__metadata__``, then the data; offsets count from the end of the header. Everything a header claims is
checked against the file before it is believed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from specmeter.errors import SpecmeterError

if TYPE_CHECKING:  # a check runs on hosts with a Python of 3.9 too
    from typing import TypeGuard

# The format's own limit on the header's length.
MAX_HEADER_BYTES = 100_000_000
# Only vocabulary maps are read: a bool or an int64 for each token of a vocabulary.
MAX_VALUES_BYTES = 32_000_000

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_STRUCT_CODES = {
    "BOOL": "?",
    "U8": "B",
    "I8": "b",
    "I16": "h",
    "U16": "H",
    "I32": "i",
    "U32": "I",
    "I64": "q",
    "U64": "Q",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor as a header states it; ``start`` and ``end`` are bytes from the start of ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: Path


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file by name. Raises SpecmeterError when the header cannot be believed."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise _lie(path, f"the file has {size} bytes, not even a header length")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise _lie(path, f"the header claims {length} bytes; the format allows {MAX_HEADER_BYTES}")
        if 8 + length > size:
            raise _lie(path, f"the header claims {length} bytes but the file has {size}")
        text = stream.read(length)
    entries = _parse(path, text)
    base = 8 + length
    tensors = {name: _tensor(path, name, entry, base, size) for name, entry in entries.items()}
    _check_layout(path, list(tensors.values()), base, size)
    return tensors


def read_integers(tensor: Tensor) -> list[int]:
    """The values of a small integer or boolean tensor, flattened."""
    length = tensor.end - tensor.start
    code = _STRUCT_CODES.get(tensor.dtype)
    if code is None:
        raise _lie(tensor.file, f"tensor {tensor.name!r} should hold integers but has dtype {tensor.dtype}")
    if length > MAX_VALUES_BYTES:
        raise _lie(tensor.file, f"tensor {tensor.name!r} has {length} bytes: too large for a vocabulary map")
    with open_regular(tensor.file) as stream:
        stream.seek(tensor.start)
        data = stream.read(length)
    count = length // struct.calcsize("<" + code)
    return [int(value) for value in struct.unpack(f"<{count}{code}", data)]


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; symlink loops, pipes, devices and folders are refused, never waited for."""
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to must not hang the check.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as fault:
        reason = "a loop of symbolic links" if fault.errno == errno.ELOOP else fault.strerror
        raise SpecmeterError(
            f"cannot open {path}", why=str(reason), next_step="Check the path and its links."
        ) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise SpecmeterError(f"{path} is not a regular file", next_step="Give the folder of a real checkpoint.")
    return os.fdopen(handle, "rb")


def load_json(path: Path, text: bytes, strict: bool = True) -> object:
    """Parse JSON that may be hostile: duplicate keys, bad encoding and deep nesting are errors that name the file.

    ``strict`` refuses NaN and Infinity too; configs are known to hold Infinity.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"the name {twice!r} occurs twice in one object")
        return table

    try:
        constant = _refuse_constant if strict else None
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise SpecmeterError(f"{path} is not sound JSON", why=reason, next_step="Fetch the file again.") from None


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is not a JSON number")


def _parse(path: Path, text: bytes) -> dict[str, object]:
    if not text.startswith(b"{"):
        raise _lie(path, "the header does not start with '{'")
    document = load_json(path, text)
    if not isinstance(document, dict):
        raise _lie(path, "the header is not an object")
    document.pop("__metadata__", None)
    return document


def _tensor(path: Path, name: str, entry: object, base: int, size: int) -> Tensor:
    if not isinstance(entry, dict):
        raise _lie(path, f"tensor {name!r} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not isinstance(dtype, str):
        raise _lie(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _lie(path, f"tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    start, end = offsets
    if start > end or base + end > size:
        raise _lie(path, f"tensor {name!r} lies at bytes {start} to {end} of {max(0, size - base)} bytes of data")
    if (math.prod(shape) * bits + 7) // 8 != end - start:
        raise _lie(path, f"tensor {name!r}, {dtype} {list(shape)}, needs another size than its {end - start} bytes")
    return Tensor(name, dtype, tuple(shape), base + start, base + end, path)


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, tensors: list[Tensor], base: int, size: int) -> None:
    filled = [tensor for tensor in tensors if tensor.end > tensor.start]
    filled.sort(key=lambda tensor: tensor.start)
    at = base
    for tensor in filled:
        if tensor.start < at:
            raise _lie(path, f"tensor {tensor.name!r} overlaps another tensor's bytes")
        if tensor.start > at:
            raise _lie(path, f"there are {tensor.start - at} bytes of no tensor before {tensor.name!r}")
        at = tensor.end
    if at != size:
        raise _lie(path, f"there are {size - at} bytes after the last tensor")


def _lie(path: Path, why: str) -> SpecmeterError:
    return SpecmeterError(
        f"{path} is not a sound safetensors file", why=why, next_step="Fetch it again, or ask who wrote it."
    )
