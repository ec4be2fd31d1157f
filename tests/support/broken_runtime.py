"""Copies of the runtime in which functions mark that they were entered, or mark it and fail."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import specmeter.runtime

RUNTIME = Path(specmeter.runtime.__file__).parent
# Called by the interpreter, the server or its libraries: these fail inside their ``try``, before it there is nothing to
# fail.
OUTERMOST = {
    "forks.py:_tell", "hook.py:ImportHook.find_spec",
    "hook.py:ImportHook._watch.exec_module", "writers.py:make_writers.end",
    "writers.py:make_writers.recover", "writers.py:make_writers.make_cycle_begin.begin",
    "probe.py:Recorder._timed.timed_end",
    "writers.py:make_writers.values_end.end", "probe.py:Recorder._fault", "control.py:ControlLine._run",
    "knobs.py:Knob.wrapped.turning_begin", "knobs.py:Knob.wrapped.finding_end", "knobs.py:Knob._fail",
    "nvtx.py:Token.__del__", "nvtx.py:Ranges.pair.ranged_begin", "nvtx.py:Ranges.pair.ranged_end",
    "nvtx.py:Ranges._stop", "plugin.py:activate", "deep.py:Deep._run", "compilers.py:follow.call",
    "arming.py:Arming._compilation_begins", "arming.py:Arming._compilation_ends",
}  # fmt: skip
# The judge of whose fault an exception is cannot be judged; the three fork handlers only call _tell; what _chain raises
# is the next sitecustomize's own.
LEFT_OUT = {"writers.py:ours", "forks.py:_before", "forks.py:_after", "forks.py:_child", "site/sitecustomize.py:_chain"}
_MARK = """
import os as _os, sys as _sys
if PLACE not in _sys.__dict__.setdefault("_entered", set()):
    _sys._entered.add(PLACE)
    _handle = _os.open(FILE, _os.O_WRONLY | _os.O_CREAT | _os.O_APPEND, 0o600)
    _os.write(_handle, PLACE.encode() + b"\\n")
    _os.close(_handle)
"""


def places() -> Iterator[str]:
    """FILE:QUALNAME of every function of the runtime, closures included."""
    for path in sorted([*RUNTIME.glob("*.py"), RUNTIME / "site" / "sitecustomize.py"]):
        for qualname, _node in functions(ast.parse(path.read_text()), ""):
            place = f"{path.relative_to(RUNTIME)}:{qualname}"
            if place not in LEFT_OUT:
                yield place


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        name = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef | ast.FunctionDef) else prefix
        yield from functions(node, name)


def marked_copy(chosen: Iterable[str], folder: Path, fails: bool) -> tuple[Path, Path]:
    """A copy of the runtime below ``folder`` whose functions at ``chosen`` write their place, and then raise if
    ``fails``; its site folder and the file of places."""
    copy, marks = folder / "runtime", folder / "entered"
    shutil.copytree(RUNTIME, copy)  # byte code too: what is not changed need not be compiled again
    by_file: dict[str, set[str]] = {}
    for place in chosen:
        name, _, qualname = place.partition(":")
        by_file.setdefault(name, set()).add(qualname)
    for name, qualnames in by_file.items():
        tree = ast.parse((copy / name).read_text())
        found = {qualname: node for qualname, node in functions(tree, "") if qualname in qualnames}
        assert set(found) == qualnames
        for qualname, node in found.items():
            body, place = node.body, f"{name}:{qualname}"
            if place in OUTERMOST:
                body = next(inner.body for inner in ast.walk(node) if isinstance(inner, ast.Try))
            text = _MARK.replace("PLACE", repr(place)).replace("FILE", repr(str(marks)))
            body[:0] = ast.parse(text + ("raise RuntimeError('injected')\n" if fails else "")).body
        (copy / name).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    return copy / "site", marks


def entered(marks: Path) -> set[str]:
    """The places that were."""
    return set(marks.read_text().splitlines()) if marks.exists() else set()


def with_site(env: Mapping[str, str], site: Path | None) -> dict[str, str]:
    """The launch route's environment with another copy of the runtime in it."""
    first, *rest = env["PYTHONPATH"].split(os.pathsep)
    assert first.endswith("site")
    return {**env, "PYTHONPATH": os.pathsep.join([str(site) if site else first, *rest])}


# One process imports torch and the compiler once; each server is a fork of it, which begins as an interpreter does.
_NURSERY = """
import json, os, signal, sys, time
import torch, torch._dynamo
torch.set_num_threads(1)
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
torch._dynamo.reset()
jobs, most_s, code = json.load(sys.stdin)
todo, running, codes, mine = list(enumerate(jobs)), {}, {}, None
while todo or running:
    while todo and len(running) < 2:
        number, job = todo.pop(0)
        child = os.fork()
        if child == 0:
            mine = job
            break
        running[child] = (number, time.monotonic() + most_s)
    if mine is not None:
        break
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        codes[running.pop(pid)[0]] = os.waitstatus_to_exitcode(status)
        continue
    for pid, (_number, until) in running.items():
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.005)
else:
    print(json.dumps([codes[number] for number in range(len(jobs))]))
if mine is not None:
    for handle, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(mine["folder"], name), os.O_WRONLY | os.O_CREAT, 0o600), handle)
    os.environ.update(mine["env"])
    sys.path[:0] = mine["env"]["PYTHONPATH"].split(os.pathsep)
    path = os.path.join(sys.path[0], "sitecustomize.py")
    exec(compile(open(path).read(), path, "exec"), {"__name__": "sitecustomize", "__file__": path})
    exec(compile(code, "<server>", "exec"), {"__name__": "__main__"})
"""


def serve_with_torch(jobs: list[dict[str, Any]], code: str, most_s: float) -> list[tuple[int, str, str]]:
    """Run ``code`` once for each of ``jobs`` (``folder`` for its output, ``env``), in forks of one process that has
    torch and its compiler; exit code, output and standard error of each. A server that takes longer is killed."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", _NURSERY], input=json.dumps([jobs, most_s, code]), capture_output=True, text=True,
        timeout=300, env={**keep, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [
        (code, (Path(job["folder"]) / "out").read_text(), (Path(job["folder"]) / "err").read_text())
        for code, job in zip(json.loads(done.stdout), jobs, strict=True)
    ]
