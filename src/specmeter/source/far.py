"""The program that runs beside the server, as ``recipes.far_program`` starts it: a request in, an answer out.

It needs nothing but this folder and CPython 3.9 or later. A request is one JSON object with ``op``:

``resolve``  ``recipes`` (as the loader gives them), ``engine_version``, ``path``, ``with_code`` -> the plan's parts
``outline``  ``target`` (dotted module or file), ``path`` -> an outline
``package``  ``target`` (package or folder), ``grep`` -> counts and matches of the whole package
``locate``   ``module``, ``path`` -> the file
``engines``  ``recipes`` -> which of their engines are installed

The answer is ``{"ok": ...}``, ``{"error": {"reason", "reached", "nearest"}}`` or ``{"fault": traceback}``. ``path`` is
an unpacked wheel or source tree to look in instead of the environment. ``entries_first`` names folders put before the
search path, as a server's working directory is.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any, Dict, List

from . import resolve as _resolve
from . import versions
from .locate import locate
from .outline import outline_target, package_target
from .pyfile import SourceError

Answer = Dict[str, Any]


def entries_of(request: Answer) -> List[str]:
    """The search path that the request is about."""
    if request.get("path"):
        packages = request.get("packages") or sorted(
            {name for name in os.listdir(request["path"]) if name.isidentifier()}
        )
        return versions.tree_roots(request["path"], packages) or [request["path"]]
    return [*request.get("entries_first", []), *sys.path]


def answer(request: Answer) -> Answer:
    """Do what the request asks. Raises SourceError with the reason when it cannot be done."""
    if sys.version_info < (3, 9):
        version = ".".join(str(part) for part in sys.version_info[:3])
        raise SourceError(f"{sys.executable} is Python {version}: at least 3.9 is needed", reached="python")
    op = request.get("op")
    if op == "resolve":
        return _resolve.resolve_recipes(request)
    if op == "engines":
        found = _resolve.engines(request["recipes"], entries_of(request))
        return {"engines": found, "python": _resolve.python_facts()}
    if op == "locate":
        located = locate(request["module"], entries_of(request))
        return {"path": located.path, "module": located.module, "zipped": located.zipped}
    if op == "package":
        return package_target(request, entries_of(request))
    if op == "outline":
        return outline_target(request, entries_of(request))
    raise SourceError(f"unknown request {op!r}")


def main() -> int:
    """Read the request from standard input and print the answer; the exit code is 0 whenever an answer was printed."""
    # A short program over trees without cycles: collecting would only cost time.
    gc.disable()
    request = json.load(sys.stdin)
    try:
        reply: Answer = {"ok": answer(request)}
    except SourceError as error:
        reply = {"error": {"reason": error.reason, "reached": error.reached, "nearest": list(error.nearest)}}
    except Exception:
        # Told apart from an interpreter that does not work: this is a fault of ours.
        reply = {"fault": traceback.format_exc()}
    json.dump(reply, sys.stdout)
    return 0
