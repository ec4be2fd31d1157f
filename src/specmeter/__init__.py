"""specmeter: where each millisecond of speculative decoding goes, and which settings win."""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from specmeter.api import SavedRun

__all__ = ["__version__", "load"]


def load(path: Path | str) -> SavedRun:
    """Read a run directory: documents as dicts, tables as numpy columns; data frames and plots (docs/api.md).

    Raises SpecmeterError when ``path`` is no run directory or was written in an unknown schema.
    """
    from specmeter.api import load as load_run

    return load_run(path)
