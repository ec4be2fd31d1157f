"""The run directories that this command has made: when it fails, empty ones go, and the others can be named."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

_MADE: list[Path] = []


def forget_runs() -> None:
    """Begin anew: a command is begun."""
    _MADE.clear()


def note_run(path: Path) -> None:
    """A run directory was made."""
    _MADE.append(path)


def tidy_runs() -> list[Path]:
    """Remove empty folders of the runs, and runs in which nothing but run.json was ever written.

    Returns the run directories that are left, without those below another.
    """
    for path in reversed(_MADE):
        with contextlib.suppress(OSError):
            _tidy(path)
    left = [path for path in _MADE if path.is_dir()]
    return [path for path in left if not any(other in path.parents for other in left)]


def kept_words(runs: list[Path]) -> str:
    """What an interrupt has left, and how to see it; empty without a run."""
    shown = "; ".join(f"{path}: `specmeter report {shlex.quote(str(path))}` shows what is complete" for path in runs)
    return f"kept in {shown}" if runs else ""


def _tidy(path: Path) -> None:
    for name in ("logs", "rings", "children"):
        with contextlib.suppress(OSError):  # not empty, or not there
            (path / name).rmdir()
    if [entry.name for entry in path.iterdir()] == ["run.json"]:
        (path / "run.json").unlink()
        path.rmdir()
        if path.parent.name == "specmeter-runs":  # ours, where no --out was given
            path.parent.rmdir()  # if it was the only one
