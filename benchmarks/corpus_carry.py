"""Line numbers for releases that the reference does not list, carried from those it does by comparing text alone.

A release lies between two that ``corpus_lines.py`` lists. Where a line of such a neighbour stands in a block of lines
that both files have in the same order, its number in the other file is known without reading the code, and nothing of
the resolver is used to find it. Lines in what changed, and in files that moved, are not carried.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from corpus_lines import expected, found_at

from specmeter.source.versions import key

Line = tuple[str, str, int]
"""Path below the tree, point name, line."""


def neighbours(engine: str, version: str, releases: Iterable[str]) -> list[str]:
    """The nearest of ``releases`` (NAME==VERSION, of one engine) before and after that the reference lists."""
    listed = [item for item in releases if any(True for _ in expected(engine, item.partition("==")[2]))]
    listed.sort(key=_order)
    before = [item for item in listed if _order(item) <= _order(f"=={version}")]
    after = [item for item in listed if _order(item) > _order(f"=={version}")]
    return [*before[-1:], *after[:1]]


def carry(engine: str, version: str, points: Sequence[Mapping[str, Any]], listed: Path, tree: Path) -> set[Line]:
    """The reference's lines of the release ``version``, which lies in ``listed``, as lines of the files in ``tree``.

    ``points`` are the plan's for ``listed``: they say which of several files a reference's line is in.
    """
    carried: set[Line] = set()
    for file, name, line in expected(engine, version):
        for path in found_at(points, file, name, line):
            own = Path(path).relative_to(listed.absolute())
            if not (tree / own).is_file():
                continue
            number = _carried(listed / own, tree / own, line)
            if number:
                carried.add((str(own), name, number))
    return carried


def differing(carried: Iterable[Line], points: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is said of each carried line at which the plan's ``points`` have no place of that name."""
    return [
        f"{name} in {file}: a line carried from a listed release is {line}, where the plan has nothing of that name"
        for file, name, line in sorted(carried)
        if not found_at(points, file, name, line)
    ]


def _order(release: str) -> tuple[Any, ...]:
    number = key(release.partition("==")[2])
    assert number is not None, release
    return number


def _carried(before: Path, after: Path, line: int) -> int:
    """The line's number in the other file, 0 where it stands in no common block."""
    for first, second, size in _blocks(before, after):
        if first < line <= first + size:
            return line - first + second
    return 0


@lru_cache(maxsize=64)
def _blocks(before: Path, after: Path) -> list[tuple[int, int, int]]:
    old, new = before.read_bytes().splitlines(), after.read_bytes().splitlines()
    if old == new:
        return [(0, 0, len(old))]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [(block.a, block.b, block.size) for block in matcher.get_matching_blocks()]
