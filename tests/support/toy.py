"""Hand-made plans: marks calls of a toy module as points, rewrites it with the interpreter that will run it."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.control import Link, make_link
from specmeter.runtime import layout

SRC = Path(__file__).resolve().parents[2] / "src"

_FAR = """
import ast, base64, json, sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import importlib, importlib.machinery, importlib.util, types
for name in ("specmeter", "specmeter.source"):
    package = types.ModuleType(name); package.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
    sys.modules[name] = package
from specmeter.source.rewrite import rewrite_module
job = json.load(sys.stdin)
tree = ast.parse(open(job["path"], "rb").read())
out = rewrite_module(tree, job["path"], job["module"], job["sha256"], job["points"])
out["blob"] = base64.b64encode(out["blob"]).decode()
out["magic"] = importlib.util.MAGIC_NUMBER.hex()
json.dump(out, sys.stdout)
"""


@dataclass
class Mark:
    """A point to make: every call whose unparsed callee is ``callee``, or the body of the function of that qualname."""

    callee: str
    name: str = ""
    role: str = "leaf"
    kind: str = "call"
    values: dict[str, str] = field(default_factory=dict)
    knob_paths: list[str] = field(default_factory=list)


@dataclass
class Toy:
    """A plan, its code blobs, and what the rewriter refused."""

    plan: dict[str, Any]
    code: dict[str, bytes]
    refused: list[dict[str, Any]]

    def link(self, base: Path, **options: Any) -> Link:
        """A link directory for it below ``base``."""
        base.mkdir(mode=0o700, exist_ok=True)
        base.chmod(0o700)
        return make_link(self.plan, self.code, base=base, **options)

    def id(self, name: str) -> int:
        """The id of the first point of that name."""
        return next(int(point["id"]) for point in self.plan["points"] if point["name"] == name)


def plan_points(source: bytes, path: str, module: str, marks: list[Mark]) -> list[dict[str, Any]]:
    """Plan entries for every place that a mark means."""
    points: list[dict[str, Any]] = []
    for node, qualname in _places(ast.parse(source), ""):
        for mark in marks:
            is_call = isinstance(node, ast.Call) and mark.kind == "call" and ast.unparse(node.func) == mark.callee
            is_body = (
                mark.kind == "body"
                and qualname == mark.callee
                and isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
            )
            if is_call or is_body:
                points.append(
                    {
                        "id": len(points) + 1,
                        "name": mark.name or mark.callee,
                        "role": mark.role,
                        "kind": mark.kind,
                        "clock": "host",
                        "required": True,
                        "module": module,
                        "path": path,
                        "sha256": hashlib.sha256(source).hexdigest(),
                        "qualname": qualname,
                        "line": node.lineno,
                        "col": node.col_offset,
                        "end_line": node.end_lineno,
                        "end_col": node.end_col_offset,
                        "values": mark.values,
                        "knob_paths": mark.knob_paths,
                    }
                )
    return points


def make_toy(folder: Path, module: str, source: str, marks: list[Mark], python: str = sys.executable) -> Toy:
    """Write ``source`` as ``folder/module.py`` and plan the marks with the interpreter ``python``."""
    path = folder / f"{module}.py"
    path.write_text(source)
    raw = path.read_bytes()
    points = plan_points(raw, str(path), module, marks)
    job = {"path": str(path), "module": module, "sha256": hashlib.sha256(raw).hexdigest(), "points": points}
    done = subprocess.run(
        [python, "-S", "-c", _FAR, str(SRC)], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    blob = base64.b64decode(answer["blob"])
    names = {f"{point['name']}.{value}" for point in points for value in point["values"]}
    plan = {
        "engine": "toy",
        "python": {"executable": python, "magic": answer["magic"]},
        "points": points,
        "refused": [],
        "value_ids": {name: 40000 + index for index, name in enumerate(sorted(names))},
    }
    return Toy(plan, {module: blob}, answer["refused"])


def records(ring: Path | None) -> np.ndarray[Any, Any]:
    """The completed records of a ring that has not wrapped, in slot order (not through the trace's reader)."""
    assert ring is not None, "the process made no ring"
    dtype = np.dtype("<i8,<i8,<u4,<u2,u1,u1,<i4,<u4")
    dtype.names = ("t0", "t1", "cycle", "point", "kind", "lane", "value", "seq")
    slots = np.fromfile(ring, dtype=dtype, offset=layout.HEADER_SIZE)
    return slots[slots["seq"] > 0]


def same_magic(python: str) -> bool:
    """Whether ``python`` loads code marshalled by this interpreter."""
    code = "import importlib.util; print(importlib.util.MAGIC_NUMBER.hex())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() == MAGIC_NUMBER.hex()


def _places(node: ast.AST, prefix: str) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            found += _places(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((child, prefix + child.name))
            found += _places(child, f"{prefix}{child.name}.<locals>.")
        else:
            found.append((child, prefix.rstrip(".").removesuffix(".<locals>")))
            found += _places(child, prefix)
    return found
