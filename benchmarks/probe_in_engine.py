"""What each probe's end takes inside a real engine's cycles, by a clock of its own: where the probes' cost lies.

    python benchmarks/probe_in_engine.py --engine embedded --seconds 40 -- python -m specmeter serve
    python benchmarks/probe_in_engine.py --seconds 60 -- python -m vllm.entrypoints.openai.api_server ...

``overhead.py`` says what the probes cost a cycle; its interval is as wide as a machine's noise. This says where that
goes: a copy of specmeter is made in which the ends read the clock once more when their record is stored, and keep the
difference from the span's end. What lies before that reading (the begin, the call of the end) is not in it: 0.2 to
0.4 us a span more when everything is warm. After a long forward nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import threading as _threading
TOOK: Any = {}


def _keep() -> None:
    import json
    while True:
        time.sleep(5)
        took = {f"{key >> 32}" if type(key) is int else key: list(value) for key, value in list(TOOK.items())}
        with open(os.path.join(os.environ["PROBE_IN_ENGINE"], f"{os.getpid()}.part"), "w") as file:
            json.dump(took, file)
        os.replace(file.name, file.name[:-5] + ".json")


_threading.Thread(target=_keep, daemon=True).start()
"""
AFTER_SPAN = "            fourth[at] = mark\n        except Exception as error:\n            if not recover("
AFTER_VALUES = (
    "            except Exception as error:\n                if not ours(error):\n                    raise\n"
)
FIRST_CALLS = 30


def main() -> None:
    """Copy, patch, run ``overhead.py`` from the copy, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "benchmarks"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        patch(Path(folder) / "src/specmeter/runtime/writers.py")
        took = Path(folder) / "took"
        took.mkdir(mode=0o700)
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src", "PROBE_IN_ENGINE": str(took)}
        words = ["--engine", args.engine, "--seconds", str(args.seconds), "--out", f"{folder}/out", "--", *args.command]
        done = subprocess.run(
            [sys.executable, f"{folder}/benchmarks/overhead.py", *words],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(done.stderr)
        names = {
            str(point["id"]): point["name"]
            for plan in Path(folder).glob("out/links/*/plan.json") for point in json.loads(plan.read_text())["points"]
        }  # fmt: skip
        show([json.loads(path.read_text()) for path in sorted(took.glob("*.json"))], names, json.loads(done.stdout))


def patch(path: Path) -> None:
    """Give the copy's ends a second clock."""
    text = path.read_text()
    for place in (AFTER_SPAN, AFTER_VALUES, "NOBODY = -1\n"):
        if place not in text:
            sys.exit(f"{path} no longer holds this once: {place!r}")
    keep = "{indent}t2 = clock()\n{indent}TOOK.setdefault({key}, []).append((t2 - t1, t1 - t0))\n"
    stored, rest = AFTER_SPAN.split("\n", 1)
    text = text.replace(AFTER_SPAN, f"{stored}\n{keep.format(indent=12 * ' ', key='point')}{rest}")
    value = keep.format(indent=16 * " ", key='f"{point}.values"')
    text = text.replace(AFTER_VALUES, f"{value}{AFTER_VALUES}", 1)
    path.write_text(text.replace("NOBODY = -1\n", f"NOBODY = -1\n{HEAD}", 1))


def show(processes: list[dict[str, Any]], names: dict[str, str], overhead: dict[str, Any]) -> None:
    """One line a point: calls a cycle, median and mean (without the slowest fiftieth) of the end, the span."""
    print(f"cycle {overhead['cycle_ms_median']} ms, {overhead['spans_per_cycle']} spans; {overhead['machine']}")
    print(f"{'point':28} {'calls':>6} {'end us':>8} {'mean us':>8} {'span us':>10}")
    total = 0.0
    for took in processes:
        counts = [len(rows) for key, rows in took.items() if len(rows) > FIRST_CALLS]
        if not counts:
            continue  # no probe of it was hit
        cycles = statistics.mode(counts) - FIRST_CALLS
        for key, rows in sorted(took.items(), key=lambda item: float(item[0].split(".")[0])):
            ends = sorted(end / 1e3 for end, _span in rows[FIRST_CALLS:])
            if not ends:
                continue
            mean = statistics.fmean(ends[: len(ends) - len(ends) // 50])
            id, _, what = key.partition(".")
            cycle = names[id].startswith("cycle")
            total += 0.0 if cycle else mean * len(ends) / cycles
            span = statistics.median(span for _end, span in rows) / 1e3
            label = f"{names[id]} {what}" + (" (not counted)" if cycle else "")
            print(f"{label:28} {len(ends) / cycles:6.2f} {statistics.median(ends):8.2f} {mean:8.2f} {span:10.1f}")
    print(
        f"ends of all points but the cycle's: {total:.1f} us a cycle, {total / overhead['cycle_ms_median'] / 10:.3f} %"
    )


if __name__ == "__main__":
    main()
