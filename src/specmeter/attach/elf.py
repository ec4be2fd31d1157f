"""Addresses of exported functions in a running process, from its memory map and the files mapped there.

Format: System V ABI, ELF-64 little endian (Tool Interface Standard ELF 1.2; 64-bit: "ELF-64 Object File Format" 1.5).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNSYM, _LOAD, _EXECUTABLE = 11, 1, 2


@dataclass(frozen=True)
class Mapped:
    """A file that a process has mapped: its path, and where its first byte lies."""

    path: str
    start: int


def mapped_files(pid: int) -> list[Mapped]:
    """The files mapped with their beginning, in order of address. Raises OSError."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/") and int(words[2], 16) == 0:
            found.append(Mapped(words[5], int(words[0].partition("-")[0], 16)))
    return found


def find(pid: int, names: set[str], files: str) -> dict[str, int]:
    """Addresses of the functions ``names`` exported by mapped files whose name matches the pattern ``files``."""
    found: dict[str, int] = {}
    for mapped in mapped_files(pid):
        if not re.search(files, Path(mapped.path).name):
            continue
        try:
            exported = exports(Path(f"/proc/{pid}/root{mapped.path}"), names)
        except (OSError, ValueError, struct.error):
            continue
        for name, (value, fixed) in exported.items():
            found.setdefault(name, value if fixed else mapped.start + value)
    return found


def exports(path: Path, names: set[str]) -> dict[str, tuple[int, bool]]:
    """For each of ``names`` that the file exports: its value, relative to where the file is mapped, or fixed.

    Raises OSError, ValueError when it is no 64-bit little-endian ELF file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _HEADER.unpack_from(data, 0)
        if header[0][:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit little-endian ELF file")
        fixed = header[1] == _EXECUTABLE
        base = 0 if fixed else _first_load(data, header)
        wanted = {name.encode(): name for name in names}
        found = {}
        for name, value in _symbols(data, header):
            if value and name in wanted:
                found[wanted[name]] = (value - base, fixed)
        return found


def _first_load(data: mmap.mmap, header: tuple[int, ...]) -> int:
    for index in range(header[10]):
        program = _PROGRAM.unpack_from(data, header[5] + index * header[9])
        if program[0] == _LOAD:
            return int(program[3] - program[2])
    return 0


def _symbols(data: mmap.mmap, header: tuple[int, ...]) -> Iterator[tuple[bytes, int]]:
    sections = [_SECTION.unpack_from(data, header[6] + index * header[11]) for index in range(header[12])]
    for section in sections:
        if section[1] != _DYNSYM:
            continue
        strings = sections[section[6]][4]
        for place in range(section[4], section[4] + section[5], _SYMBOL.size):
            name, _, _, _, value, _ = _SYMBOL.unpack_from(data, place)
            end = data.find(b"\0", strings + name)
            yield data[strings + name : end], value
