"""What a folder holds, to see that nothing changed."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, object]:
    """Every file and folder below, with its mode and bytes; byte code caches and pipes' contents left out."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts:
            found[str(path.relative_to(folder))] = (
                path.lstat().st_mode,
                path.read_bytes() if path.is_file() and not path.is_symlink() else b"",
            )
    return found
