"""Files that are written whole or not at all, and one clear error where the disk does not take them."""

from __future__ import annotations

import os
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
