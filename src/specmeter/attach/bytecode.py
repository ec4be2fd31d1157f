"""Byte code of the runtime, made by the server's own interpreter: its main thread then has nothing to compile."""

from __future__ import annotations

import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

# Run by the server's interpreter. What it compiles is replaced by nobody, so Python need not check it.
_PROGRAM = """
import importlib.util, os, py_compile, sys
folder, out = sys.argv[1:]
for name in sorted(os.listdir(folder)):
    if name.endswith(".py"):
        target = os.path.join(out, os.path.basename(importlib.util.cache_from_source(name)))
        source = os.path.join(folder, name)
        py_compile.compile(source, target, name, True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""
_TIMEOUT_S = 20


@lru_cache(maxsize=8)
def compiled(python: str, folder: Path) -> dict[str, bytes]:
    """The ``.pyc`` files, by name, that the interpreter ``python`` makes of the modules in ``folder``.

    Empty when it cannot: the server then compiles them by itself, which takes its main thread some 20 ms.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [python, "-I", "-S", "-c", _PROGRAM, str(folder), out]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return {}
        return {path.name: path.read_bytes() for path in Path(out).glob("*.pyc")} if done.returncode == 0 else {}
