"""Copies files that take less room than they are long, without filling their holes."""

from __future__ import annotations

import shutil
from pathlib import Path

_PIECE = 1 << 16


def copy_sparse(source: Path, to: Path) -> None:
    """Copy a file's contents. Pieces that are all zero are holes in the copy, where the source has any.

    A ring has room for more records than most runs write. Raises OSError.
    """
    info = source.stat()
    if getattr(info, "st_blocks", info.st_size) * 512 >= info.st_size:
        shutil.copyfile(source, to)
        return
    with source.open("rb") as old, to.open("wb") as new:
        size = 0
        while piece := old.read(_PIECE):
            if piece.count(0) < len(piece):
                new.seek(size)
                new.write(piece)
            size += len(piece)
        new.truncate(size)
