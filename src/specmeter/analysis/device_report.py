"""Device time in a profile's document: from windows at hand, or from those that a saved run keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.analysis.collective_document import collective_facts
from specmeter.analysis.device_document import device_facts
from specmeter.analysis.device_join import Mask
from specmeter.analysis.kernel_classes import Patterns
from specmeter.analysis.verify_sides import Server
from specmeter.analysis.verify_width import verify_width
from specmeter.trace.build import Trace, load_rings
from specmeter.trace.deep import DeepWindow, load_deep
from specmeter.trace.requests import Request
from specmeter.trace.rundir import Run, load

BASELINE = "baseline"
Recorded = tuple[Trace, Sequence[DeepWindow]]


def with_device(
    document: Mapping[str, Any],
    trace: Trace,
    windows: Sequence[DeepWindow],
    plain: Recorded | None = None,
    server: Server | None = None,
    patterns: Patterns | None = None,
) -> dict[str, Any]:
    """The document with ``device.windows``, ``verify_width`` and ``collectives``; as it was without windows.

    ``plain`` is another start of the same server without speculation: its trace and its windows. Without it, windows
    whose setting is the baseline are the plain step's.
    """
    mine = [window for window in windows if window.setting != BASELINE]
    beside = [window for window in windows if window.setting == BASELINE]
    if not mine:
        return dict(document)
    requests = _requests(trace, document.get("setting"))
    plain = plain or ((trace, beside) if beside else None)
    return {
        **document,
        "device": device_facts(document.get("device"), trace, mine, requests, patterns),
        "verify_width": verify_width(trace, mine, plain, server, requests, patterns),
        "collectives": collective_facts(trace, windows, requests),
    }


def with_kept(document: Mapping[str, Any], folder: Path, trace: Trace, server: Server | None = None) -> dict[str, Any]:
    """``with_device`` from the windows that a run directory, finished or not, keeps, and its child ``baseline``'s."""
    return with_device(document, trace, load_deep(folder, trace), _baseline(folder), server)


def _baseline(folder: Path) -> Recorded | None:
    below = folder / "children" / BASELINE
    return _recorded(load(below)) if (below / "deep").is_dir() else None


def saved_device(run: Run, server: Server | None = None, patterns: Patterns | None = None, again: bool = False) -> Run:
    """The run with device time in its analysis, if it is a profile that keeps windows and does not have it already.

    ``again`` computes it anew, with what is now known of the server or other patterns.

    The windows of its child ``baseline`` are the plain step's. Raises SpecmeterError for damaged windows or rings.
    """
    has = bool((run.analysis.get("device") or {}).get("windows"))
    if run.analysis.get("kind") != "profile" or (has and not again):
        return run
    mine = _recorded(run)
    if mine is None:
        return run
    return replace(run, analysis=with_device(run.analysis, *mine, _baseline(run.path), server, patterns))


def _recorded(run: Run) -> Recorded | None:
    """A saved run's trace, read from its rings again, and its windows; None where it keeps none."""
    rings = sorted((run.path / "rings").glob("*.ring"))
    if not (run.path / "deep").is_dir() or not rings:
        return None
    trace = load_rings(rings, run.plan, _saved_requests(run))
    windows = load_deep(run.path, trace)
    return (trace, windows) if windows else None


def _saved_requests(run: Run) -> list[Request]:
    table = run.requests
    if not table:
        return []
    names = [name for name in Request.__dataclass_fields__ if name in table]
    rows = zip(*(table[name].tolist() for name in names), strict=True)
    return [Request(**dict(zip(names, row, strict=True))) for row in rows]


def _requests(trace: Trace, setting: str | None) -> Mask | None:
    """Which of the trace's requests a profile of ``setting`` is of; None where no request is known."""
    if not trace.requests:
        return None
    wanted = [
        not r.error and (r.setting != BASELINE if setting is None else r.setting == setting) for r in trace.requests
    ]
    return np.array(wanted, bool)
