"""specmeter: where each millisecond of speculative decoding goes, and which settings win."""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from specmeter.trace.rundir import Run

__all__ = ["__version__", "load"]


def load(path: Path | str) -> Run:
    """Read a run directory: its documents as dicts, its tables as dicts of numpy columns.

    Raises SpecmeterError when ``path`` is no run directory or was written in an unknown schema.
    """
    from specmeter.trace.rundir import load as load_run

    return load_run(path)
