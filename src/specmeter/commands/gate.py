"""``specmeter gate RUN --against SAVED``: exit 1 when accept length, cycle or break-even got worse beyond noise."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from specmeter.analysis.gate import DEFAULTS, Finding, judge, missing_settings, passed
from specmeter.commands.explain import print_document
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.terminal import print_analysis
from specmeter.trace.rundir import Run, load

_HELP = {
    "accept_length": "less accept length than this share is a finding",
    "cycle": "a longer cycle than this share is a finding",
    "break_even": "a higher break-even than this share is a finding",
}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gate``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run to judge, of profile or sweep")
    parser.add_argument(
        "--against", type=Path, required=True, metavar="SAVED", help="the run that it must not be worse than"
    )
    for name, value in DEFAULTS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=value,
            metavar="X",
            help=f"{_HELP[name]} (default: {value})",
        )
    parser.add_argument("--settled", action="store_true", help="fail too when noise leaves a quantity open")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Judge; 0 if nothing got worse, 1 if something did."""
    thresholds = {name: getattr(args, name) for name in DEFAULTS}
    for name, value in thresholds.items():
        if not 0 <= value < 1:
            raise SpecmeterError(f"--{name.replace('_', '-')} is {value}.", "It is a share: 0.02 means 2 %.")
    new, saved = load(args.run), load(args.against)
    findings = judge(new, saved, thresholds)
    missing = missing_settings(new, saved)
    good = passed(findings) and not (args.settled and (missing or any(f.word == "unsettled" for f in findings)))
    document = as_document(new, saved, findings, good, missing)
    warnings = [f"{r.path} is not complete: it was cut off" for r in (new, saved) if r.run.get("status") != "complete"]
    if missing:
        warnings.append(f"{new.path} lacks {', '.join(missing)} of the saved run: not judged")
    if args.json:
        print_document("gate", document, warnings)
    else:
        print_analysis(document)
        for warning in warnings:
            print(f"note: {warning}")
    return int(Exit.DONE if good else Exit.FINDING)


def as_document(new: Run, saved: Run, findings: tuple[Finding, ...], good: bool, missing: list[str]) -> dict[str, Any]:
    """The result as JSON."""
    return {
        "kind": "gate",
        "run": str(new.path),
        "against": str(saved.path),
        "passed": good,
        "missing_settings": missing,
        "findings": [
            {
                "setting": f.setting, "quantity": f.quantity, "unit": f.unit, "before": f.before, "after": f.after,
                "ratio": f.ratio.as_json() if f.ratio else None, "threshold": f.threshold, "word": f.word,
                "reason": f.reason,
            }
            for f in findings
        ],
    }  # fmt: skip
