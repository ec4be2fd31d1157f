"""eight_gpu.py on a bare machine: SGLang unpacked first, then the run with its packages. Standard library alone.

    python benchmarks/eight_run.py WORK --from PARTS --out OUT [what ``eight_gpu.py run`` takes]

A bare machine has none of what eight_gpu.py imports before WORK/site is there. A call that had to unpack for longer
than ``SHORT_S`` ends with 75 (call again), so that the next one has its whole time for measuring.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from gpu_unpack import MORE, unpack

HERE = Path(__file__).resolve().parent
BUDGET_S, SHORT_S = 540.0, 60.0


def option(words: list[str], name: str) -> str | None:
    """The value of an option as ``--name value`` or ``--name=value``; None without it."""
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def main() -> None:
    """Unpack what this call brought; when all is there, become eight_gpu.py."""
    began = time.monotonic()
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    work, words = Path(sys.argv[1]).resolve(), sys.argv[2:]
    work.mkdir(parents=True, exist_ok=True)
    if code := unpack(work, Path(option(words, "--from") or ".gpu")):
        sys.exit(code)
    spent = time.monotonic() - began
    if spent > SHORT_S:
        print(f"unpacked in {spent:.0f} s: call again", flush=True)
        sys.exit(MORE)
    budget = float(option(words, "--budget") or BUDGET_S) - spent
    site = work / "site"
    path = os.pathsep.join([str(HERE.parent / "src"), str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / "eight_gpu.py"), "run", str(site), str(work), *words, "--budget", f"{budget}"]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    main()
