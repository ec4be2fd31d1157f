"""What ``explain`` foretells from one recorded run against a recorded sweep over step counts: errors, by three models.

    python benchmarks/explain_recorded.py RESULTS [--run run-steps3 --sweep adaptive.sweep.json]

RESULTS is a shape's folder as sglang_dummy_gpu.py leaves it. No server and no clock: the same everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import specmeter
from specmeter.analysis import costmodel_data
from specmeter.analysis.costmodel_curve import curve
from specmeter.analysis.costmodel_evidence import Evidence
from specmeter.analysis.costmodel_explain import evidence_of


@contextmanager
def all_cycles() -> Iterator[None]:
    """With the cycles that ran under the profiler and after it, as before they were told from the others."""
    with mock.patch.object(costmodel_data, "window_begins", lambda folder: []):
        yield


def models(folder: Path) -> dict[str, Evidence]:
    """The evidence of each model, by what it is called."""
    run = specmeter.load(folder)
    own = evidence_of([run])
    with all_cycles():
        before = replace(evidence_of([run]), device_step=None)
    return {
        "host's spans, cycles slowed by the profiler among them": before,
        "host's spans": replace(own, device_step=None),
        "the device's draft step": own,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--run", default="run-steps3")
    parser.add_argument("--sweep", default="adaptive.sweep.json")
    args = parser.parse_args()
    rows = json.loads((args.results / args.sweep).read_text())["rows"]
    measured = {int(k): row for k, row in rows.items() if int(k)}
    for name, evidence in models(args.results / args.run).items():
        step = evidence.device_step
        print(f"{name}{f' ({step.ms:.4f} ms)' if step else ''}, from {evidence.now} steps")
        for row in curve(evidence, sorted(measured)):
            cycle, rate = measured[row.steps]["cycle_ms"]["point"], measured[row.steps]["tok_s"]["point"]
            bound = 100 * (row.cycle_ms.high / row.cycle_ms.point - 1)
            print(
                f"  k={row.steps}  cycle {row.cycle_ms.point:.3f} ms +-{bound:.0f} %, measured {cycle:.3f}: "
                f"{100 * (row.cycle_ms.point / cycle - 1):+.1f} %   tok/s {row.tok_s.point:.1f}, measured {rate:.1f}: "
                f"{100 * (row.tok_s.point / rate - 1):+.1f} %"
            )


if __name__ == "__main__":
    main()
