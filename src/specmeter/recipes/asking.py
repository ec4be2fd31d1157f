"""Questions to ``source/far.py`` under the server's own interpreter, which imports none of what it looks at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmeter import source
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.far_program import run_program

FAR = Path(source.__file__).parent / "far.py"
ELSEWHERE = "Name the server's own interpreter with --python, or an unpacked wheel or source tree with --path."


def ask_far(python: Path, request: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run ``source/far.py`` under ``python`` with the request and give its answer.

    Raises SpecmeterError: exit 5 when that Python cannot run it, 3 or 5 with the reason when it answers with a refusal.
    """
    answer = run_program(python, FAR, request, env)
    if "error" in answer:
        raise _refusal(python, answer["error"])
    reply: dict[str, Any] = answer["ok"]
    return reply


def checked_tree(path: Path | None) -> Path | None:
    """What ``--path`` names, if anything; raises SpecmeterError where it is no folder."""
    if path is not None and not path.is_dir():
        raise SpecmeterError(f"{path} is not a folder.", next_step="Name an unpacked wheel or a source tree.")
    return path


def _refusal(python: Path, error: Mapping[str, Any]) -> SpecmeterError:
    near = f" Nearest: {', '.join(error['nearest'])}." if error["nearest"] else ""
    if error["reached"] == "range":
        step = "Use a newer specmeter, or give a recipe for this version with --recipe (docs/recipes.md)."
        return SpecmeterError(f"{error['reason']}.", next_step=step, exit=Exit.REFUSED)
    if error["reached"] == "version":
        step = f"{ELSEWHERE} Where it is there without metadata, say its version: --engine NAME==VERSION."
        return SpecmeterError(f"{error['reason']}.", next_step=step, exit=Exit.ENVIRONMENT)
    return SpecmeterError(f"{error['reason']}.{near}", f"Asked of {python}.", ELSEWHERE, Exit.ENVIRONMENT)
