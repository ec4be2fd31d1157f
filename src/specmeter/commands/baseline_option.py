"""``--baseline DIR`` of the commands that show a server: what a saved run measured of plain decoding."""

from __future__ import annotations

from pathlib import Path

from specmeter.analysis.saved_baseline import named_step
from specmeter.exports.figures import baseline_of
from specmeter.trace.rundir import load


def baseline_figures(folder: Path | None) -> tuple[float | None, float | None]:
    """(Baseline step in seconds, probes' share of a cycle or None) of a saved run; both None without a folder.

    Raises SpecmeterError for a run that measured no baseline step.
    """
    if folder is None:
        return None, None
    run = load(folder)
    return named_step(run).point / 1e3, baseline_of(run)[1]
