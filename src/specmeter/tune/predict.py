"""The cost model's predictions for the planner, from saved profiles or sweeps of the same server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specmeter.analysis.collective_words import nccl_cannot_help
from specmeter.analysis.costmodel_curve import curve
from specmeter.analysis.costmodel_explain import evidence_of
from specmeter.engines import Setting
from specmeter.trace.rundir import load
from specmeter.tune.planner import Predict


def predictions(profiles: Sequence[Path], settings: Sequence[Setting]) -> Predict:
    """Tokens a second of every chain among ``settings`` from the runs; trees and the baseline are left to the trials.

    Raises SpecmeterError for a run that holds nothing for the model.
    """
    evidence = evidence_of([load(path) for path in profiles])
    steps = sorted({setting.steps for setting in settings if setting.steps and setting.topk == 1})
    rates = {row.steps: row.tok_s.point for row in curve(evidence, steps)}
    return lambda setting: rates.get(setting.steps) if setting.topk == 1 else None


def nccl_verdict(profiles: Sequence[Path]) -> str | None:
    """Why no variable of NCCL can help, if that is so in each of the runs that saw collectives; else None."""
    seen = [run.analysis for run in map(load, profiles) if (run.analysis.get("collectives") or {}).get("phases")]
    reasons = [nccl_cannot_help(analysis) for analysis in seen]
    return reasons[0] if reasons and all(reasons) else None
