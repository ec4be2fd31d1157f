"""The program that patches, beside the server and with its interpreter, as ``recipes.far_program`` starts it.

A request is one JSON object with ``op``:

``preview``  ``candidates`` [[path, ...], ...]: of each list the first that exists -> what applying would do to each
``apply``    ``path``, ``files`` {name: base64}, ``facts``, ``expected`` sha256 -> {"outcome"}
``restore``  ``path``, ``keep_changes`` -> {"outcome"}
``look``     ``paths``, or none for the list of this user -> states

The answer is ``{"ok": ...}``, ``{"refused": {what, why, next, diff}}`` or ``{"fault": traceback}``.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import traceback
from typing import Any, Dict

from . import index
from .disk import Refused
from .operate import apply, preview, restore
from .state import look

Answer = Dict[str, Any]


def answer(request: Answer) -> Answer:
    """Do what the request asks. Raises Refused."""
    op = request["op"]
    if op == "preview":
        # Whatever is there: what is no file is then refused by its name.
        found = [next((path for path in group if os.path.exists(path)), None) for group in request["candidates"]]
        return {"targets": [os.path.realpath(path) if path else None for path in found], "files": _previews(found)}
    if op == "apply":
        files = {name: base64.b64decode(content) for name, content in request["files"].items()}
        return {"outcome": apply(request["path"], files, request["facts"], request.get("expected"))}
    if op == "restore":
        return {"outcome": restore(request["path"], bool(request.get("keep_changes")))}
    if op == "look":
        paths = request.get("paths") or index.listed()
        return {"states": [_look(path) for path in paths]}
    raise Refused(f"Unknown request {op!r}.")


def _previews(paths: Any) -> Answer:
    return {path: preview(path) for path in dict.fromkeys(os.path.realpath(item) for item in paths if item)}


def _look(path: str) -> Answer:
    try:
        return look(path).as_json()
    except OSError as error:
        return {"path": path, "kind": "unreadable", "sha256": None, "manifest": None, "reason": error.strerror}


def main() -> int:
    """Read the request from standard input and print the answer; the exit code is 0 whenever an answer was printed."""
    request = json.load(sys.stdin)
    try:
        reply: Answer = {"ok": answer(request)}
    except Refused as refusal:
        reply = {"refused": {key: getattr(refusal, key) for key in ("what", "why", "next", "diff")}}
    except Exception:
        reply = {"fault": traceback.format_exc()}
    json.dump(reply, sys.stdout)
    return 0
