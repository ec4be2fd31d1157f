"""What the run directories of a GPU part say about device time, without a server: agreement, coverage, verify's width.

    python benchmarks/gpu_together.py RESULTS [--spec run-spec3 --plain run-plain]

RESULTS is a part's folder. Writes RESULTS/device.json and, for each run with deep windows, RESULTS/RUN.device.txt. The
run directories themselves can be shown with ``specmeter report``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gpu_steps import read

import specmeter
from specmeter.analysis.collective_document import collective_facts
from specmeter.analysis.costmodel_bytes import read_shape
from specmeter.analysis.device_agreement import idle_agreement, overhead_rows, span_agreement
from specmeter.analysis.device_join import chosen_cycles, join
from specmeter.analysis.device_report import saved_device
from specmeter.analysis.verify_width import Server
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request, Trace, load_rings
from specmeter.trace.deep import load_deep
from specmeter.trace.ring import read_ring
from specmeter.trace.rundir import Run

# One stamp after another on an H200, by benchmarks/device_stamp_cost.py: so far apart are a graph's two end stamps
# without kernels between them.
STAMP_NS = 1260.0


def trace_of(run: Run) -> Trace:
    """The run's trace, from its rings and requests."""
    table = run.requests
    names = [name for name in Request.__dataclass_fields__ if name in table]
    rows = zip(*(table[name].tolist() for name in names), strict=True)
    requests = [Request(**dict(zip(names, row, strict=True))) for row in rows]
    return load_rings(sorted((run.path / "rings").glob("*.ring")), run.plan, requests)


def agreement(run: Run, stamp_ns: float = STAMP_NS) -> list[dict[str, Any]]:
    """Of each deep window: always-on spans and idle time against the profiler's, on the same cycles."""
    trace = trace_of(run)
    rings = [read_ring(path) for path in sorted((run.path / "rings").glob("*.ring"))]
    found = []
    for window in load_deep(run.path, trace):
        joined = join(trace, window)
        mine = [ring for ring in rings if ring.header.pid == window.pid]
        if joined is None or not mine:
            found.append({"pid": window.pid, "reason": "its ring is not in the run"})
            continue
        cycles = chosen_cycles(joined)
        leaf = joined.leaf & (joined.cycle >= 0) & cycles[np.maximum(joined.cycle, 0)]
        all_of = (joined.cycle >= 0) & cycles[np.maximum(joined.cycle, 0)]
        busy = float(joined.added[all_of].sum())
        found.append(
            {
                "setting": window.setting,
                "rank": window.rank,
                "cycles": int(np.count_nonzero(cycles)),
                "coverage_percent": 100 * float(joined.added[leaf].sum()) / busy if busy else None,
                "spans": span_agreement(mine[0], joined, cycles, stamp_ns),
                "idle": idle_agreement(mine, joined, cycles),
                "cost": window.cost,
            }
        )
    return found


def with_plain(folder: Path, spec: str, plain: str) -> Run:
    """The speculative run with the plain one as its child ``baseline``, whose windows are the plain step's."""
    child = folder / spec / "children" / "baseline"
    if (folder / plain).is_dir() and not child.exists():
        child.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copytree(folder / plain, child)
    return specmeter.load(folder / spec)


def device(folder: Path, spec: str, plain: str, server: Server | None = None) -> dict[str, Any]:
    """The device document of one pair of runs, with agreement and collectives; also as text."""
    run = saved_device(with_plain(folder, spec, plain), server, again=server is not None)
    trace = trace_of(run)
    document = dict(run.analysis)
    document["collectives"] = collective_facts(trace, load_deep(run.path, trace))
    (folder / f"{spec}.device.txt").write_text(render_analysis(document, width=120))
    return {
        "device": document.get("device"),
        "verify_width": document.get("verify_width"),
        "collectives": document["collectives"],
        "overhead": overhead_rows(document),
        "agreement": agreement(replace(run, analysis=document)),
    }


def facts(folder: Path) -> Server | None:
    """What sglang_dummy_gpu.py noted of model and card, with the experts that it measured; None without a note."""
    try:
        noted = json.loads((folder / "facts.json").read_text())
    except FileNotFoundError:
        return None
    card = noted.get("gb_s_of_a_card")
    experts = (read(folder, "experts") or {}).get("measured")
    pair = (float(experts["4"]), float(experts["1"])) if experts else None
    return Server(
        read_shape(folder / "target.config.json"), card * noted["tp"] if card else None, noted["context"], pair
    )


def all_devices(folder: Path, plain: str = "run-plain") -> dict[str, Any]:
    """Every run of the folder that holds deep windows; what fails is told and leaves the others alone.

    A run is held against ``plain``, or against run-NAME-plain where there is one (another attention kernel).
    """
    found: dict[str, Any] = {}
    server = facts(folder)
    for path in sorted(folder.glob("run-*")):
        if not (path / "deep").is_dir() or path.name == plain or path.name.endswith("-plain"):
            continue
        own = f"{path.name}-plain"
        try:
            found[path.name] = device(folder, path.name, own if (folder / own / "deep").is_dir() else plain, server)
        except Exception:
            found[path.name] = {"error": traceback.format_exc()}
    (folder / "device.json").write_text(json.dumps(found, indent=1, default=str))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plain", default="run-plain")
    args = parser.parse_args()
    for name, document in all_devices(args.results, args.plain).items():
        print(f"== {name}")
        print(document.get("error") or (args.results / f"{name}.device.txt").read_text())
        for window in document.get("agreement") or []:
            print(json.dumps(window, indent=1, default=str))


if __name__ == "__main__":
    main()
