"""Which nested code something else than its outer function refers to: what a pass over all objects is made for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PYTHONS = [sys.executable, *map(str, sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")))]
PROGRAM = """
import sys
from specmeter.runtime import swap

def outer():
    def inner():
        def leaf():
            return 1
        return leaf
    return inner

def pairs():
    return [(code, code) for code in swap.nested_codes(outer.__code__) if code is not outer.__code__]

def seen():
    found = pairs()
    found = [(first, None) for first, _ in found]
    return swap._held(found)

answers = [seen()]
inner = outer()
answers.append(seen())
leaf = inner()
del inner
answers.append(seen())
del leaf
answers.append(seen())
print(answers)
"""


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: f"{len(path)}-{Path(path).parent.parent.name}")
def test_a_closure_is_seen_and_its_absence_too(python: str) -> None:
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 9))"]).returncode:
        pytest.skip("older than the runtime allows")
    source = str(Path(__file__).resolve().parents[3] / "src")
    done = subprocess.run([python, "-c", PROGRAM], env={"PYTHONPATH": source}, capture_output=True, text=True)
    none, inner, leaf = "[False, False]", "[True, False]", "[False, True]"
    assert done.stdout == f"[{none}, {inner}, {leaf}, {none}]\n", done.stderr
