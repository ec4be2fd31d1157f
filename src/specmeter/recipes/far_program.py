"""Runs one of the programs that stand beside the server (``source/far.py``, ``patch/far.py``) under its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmeter.errors import Exit, SpecmeterError

_TIMEOUT_S = 120
# Imports the program as a module of its folder, which becomes a package wherever it was copied to, and leaves nothing
# of ours on the search path: neither the working directory, which -c puts there, nor the folder's own.
_START = """\
import os, sys
if sys.path and not sys.path[0]:
    sys.path.pop(0)
folder, name = os.path.split(sys.argv.pop(1))
sys.path.insert(0, os.path.dirname(folder))
__import__(os.path.basename(folder))
sys.path.pop(0)
sys.exit(__import__(os.path.basename(folder) + "." + name[:-3], fromlist=["main"]).main())
"""


def program_command(python: Path | str, program: Path) -> list[str]:
    """The words that run such a program: it reads a request on standard input and writes an answer."""
    return [str(python), "-c", _START, str(program)]


def run_program(
    python: Path, program: Path, request: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The answer of ``program``, a JSON object, to ``request``, under ``python`` with the environment ``env`` (or this
    process's own): ``{"ok": ...}`` or a refusal in the program's own words.

    Raises SpecmeterError with exit 5 when that Python cannot run it, RuntimeError when the program itself failed.
    """
    environment = dict(os.environ if env is None else env)
    # It must neither arm itself nor leave compiled files beside the copied folder.
    environment.pop("SPECMETER_LINK", None)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            program_command(python, program),
            input=json.dumps(request).encode(),
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise _broken(python, error.strerror or str(error)) from None
    except subprocess.TimeoutExpired:
        raise _broken(python, f"it gave no answer within {_TIMEOUT_S} s") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise _broken(python, lines[-1] if lines else f"it ended with code {done.returncode}") from None
    if "fault" in answer:
        raise RuntimeError(f"{program} failed under {python}:\n{answer['fault']}")
    return answer


def _broken(python: Path, why: str) -> SpecmeterError:
    return SpecmeterError(
        f"The Python interpreter {python} does not work.",
        why=why,
        next_step="Name the interpreter that runs the server with --python (CPython 3.9 or later).",
        exit=Exit.ENVIRONMENT,
    )
