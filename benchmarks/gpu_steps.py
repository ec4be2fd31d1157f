"""The measurements of one part: each has a results file of its own, a failed one does not stop the rest.

A part's servers take minutes to start, so its measurements share them; a later call starts only the servers that the
measurements still to be done need.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_fleet import Fleet, Place, Server, Start


@dataclass(frozen=True)
class Step:
    """``run`` measures ``server`` and gives what is written to NAME.json; ``seconds`` is what it is expected to take.

    ``after``: steps whose results it reads.
    """

    name: str
    server: str
    seconds: float
    run: Callable[[Server, Path], dict[str, Any]]
    after: tuple[str, ...] = ()


def read(out: Path, name: str) -> dict[str, Any] | None:
    """The results of a step that is done, else None."""
    try:
        found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found


def write(out: Path, name: str, document: object) -> None:
    """Keep a step's results."""
    new = out / f".{name}.new"
    new.write_text(json.dumps(document, indent=1, default=str))
    new.replace(out / f"{name}.json")


def run_steps(
    place: Place, starts: Sequence[Start], steps: Sequence[Step], out: Path, limit_s: float, start_s: float = 240.0
) -> None:
    """Do what is not done yet, for at most ``limit_s`` seconds; the starts get what the measurements leave, or half,
    but never more than ``start_s``.

    Raises RuntimeError that names what is left, so that the part is not taken as done.
    """
    end = time.monotonic() + limit_s
    wanted = [step for step in steps if read(out, step.name) is None]
    names = {step.server for step in wanted}
    if wanted:
        with Fleet(place, [start for start in starts if start.name in names]) as fleet:
            fleet.wait(min(start_s, max(limit_s / 2, limit_s - sum(step.seconds for step in wanted))))
            write(out, "starts", {**(read(out, "starts") or {}), **fleet.facts()})
            for step in wanted:
                _one(step, fleet, out, end)
            fleet.end()
    left = [step.name for step in steps if read(out, step.name) is None]
    if left:
        raise RuntimeError(f"not measured: {', '.join(left)}")


def _one(step: Step, fleet: Fleet, out: Path, end: float) -> None:
    missing = [name for name in step.after if read(out, name) is None]
    rest = end - time.monotonic()
    if missing or rest < step.seconds:
        why = f"needs {', '.join(missing)}" if missing else f"{step.seconds:.0f} s do not fit into {rest:.0f} s"
        print(f"{step.name}: left out, {why}", flush=True)
        return
    began = time.monotonic()
    try:
        with fleet.only(step.server) as server:
            found = step.run(server, out)
    except Exception as error:
        (out / f"{step.name}.error.txt").write_text(traceback.format_exc())
        print(f"{step.name}: {type(error).__name__}: {error}", flush=True)
        return
    write(out, step.name, {"seconds": round(time.monotonic() - began, 1), **found})
    print(f"{step.name}: done in {time.monotonic() - began:.0f} s {found.get('line', '')}", flush=True)
