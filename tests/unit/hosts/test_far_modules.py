"""What is sent to a far host runs there: every module of every bundle, on the oldest Python that is promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specmeter.hosts.bundle import RELAY, bundle

OLDEST = sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python"))
# Run by the server or the client themselves, or needed by `check --probe` alone, which is refused there.
NOT_IMPORTED = ("far_start", "sitecustomize", "runtime.plugin", "patch.start", "source.far", "patch.far")
REFUSED_THERE = ("numeric", "numeric_run", "scan", "probe", "measure")
PROGRAM = """
import importlib, pathlib, sys, zipfile
sys.path.insert(0, sys.argv[1])
with zipfile.ZipFile(sys.argv[1]) as archive:
    names = [name for name in archive.namelist() if name.startswith("specmeter/") and name.endswith(".py")]
for name in names:
    module = name[:-3].replace("/", ".").replace(".__init__", "")
    if not module.endswith(tuple(sys.argv[2:])):
        try:
            importlib.import_module(module)
        except Exception as error:
            print(module, type(error).__name__, error)
"""


@pytest.mark.parametrize("command", [RELAY, "check", "run", "attach", "patch", "plan", "recipe"])  # others are parts
def test_everything_that_is_sent_can_be_imported_there(command: str, tmp_path: Path) -> None:
    python = str(OLDEST[0]) if OLDEST else sys.executable
    archive = tmp_path / "sent.zip"
    archive.write_bytes(bundle(command))
    assert archive.stat().st_size < 330_000
    left_out = (*NOT_IMPORTED, *(f"wiring.{name}" for name in REFUSED_THERE))
    # -S and -E: nothing that is installed for this Python, and nothing of this checkout.
    words = [python, "-B", "-S", "-E", "-c", PROGRAM, str(archive), *left_out]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
