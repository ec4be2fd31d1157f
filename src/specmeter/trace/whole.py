"""Files that are written whole or not at all, and one clear error where the disk does not take them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specmeter.errors import Exit, SpecmeterError


class NotSaved(SpecmeterError):
    """Something of a run could not be written; what was measured is not lost by that alone."""

    @classmethod
    def into(cls, folder: Path, error: OSError) -> NotSaved:
        """The error for a write into ``folder`` that failed with ``error``."""
        reason = os.strerror(error.errno) if error.errno else str(error)
        return cls(
            f"The run could not be saved whole into {folder}",
            f"{reason}.",
            "Make room there, or name a directory on another disk with --out, and run it again.",
            Exit.ENVIRONMENT,
        )


@contextmanager
def whole(path: Path, part: Path) -> Iterator[Path]:
    """Gives ``part`` to be written; it becomes ``path`` (0600), and goes where anything fails.

    Raises NotSaved for an OSError inside.
    """
    try:
        yield part
        part.chmod(0o600)
        part.replace(path)
    except OSError as error:
        raise NotSaved.into(path.parent, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file that the user named, 0600, whole or not at all.

    It is written beside its place first, under a name that nobody can know before: in a folder of many users a link
    put there is not followed. Raises SpecmeterError (exit 2 for a path without a name, else 5).
    """
    if not path.name or path.is_dir():
        raise SpecmeterError(f"{path} names no file.", "It is a directory.", f"Name a file, as in {path / 'FILE'}.")
    part: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=".specmeter-", suffix=".part", dir=path.parent)
        part = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
        part = None
    except OSError as error:
        raise SpecmeterError(
            f"{path} cannot be written", str(error.strerror), "Name another path.", Exit.ENVIRONMENT
        ) from error
    finally:
        if part is not None:
            with suppress(OSError):
                part.unlink()
