"""What ``specmeter source`` says of a file, a module and a process, and that nothing of the engine runs for it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmeter import cli

TEXT = '''"""An engine that must not be imported."""
import os, sys as system
from .helper import run as go
raise SystemExit("imported")

@wrapped(1)
class Worker(Base, kind.Other, metaclass=Meta):
    @property
    def size(self) -> int: return 1

    async def step(self, rows: list[int], *, deep=False, **rest):
        def inner(x): return go(x)
        return self.size + inner(len(rows))  # a call of gone() in a comment, "lost()" in a text
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """``pkg.core`` below ``tmp_path``."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "pkg" / "helper.py").touch()
    (tmp_path / "pkg" / "core.py").write_text(TEXT)
    return tmp_path / "pkg" / "core.py"


def source(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["source", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "specmeter/source/1" and document["command"] == "source"
    found: dict[str, Any] = document["result"]
    return found


def test_everything_that_an_outline_holds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = source(capsys, "pkg.core", "--path", str(file.parents[1]))
    data = file.read_bytes()
    assert (found["module"], found["path"], found["size"]) == ("pkg.core", str(file), len(data))
    assert found["sha256"] == hashlib.sha256(data).hexdigest()
    assert (found["encoding"], found["newline"], found["line_count"], found["zipped"]) == ("utf-8", "LF", 13, False)
    assert [(item["line"], item["text"]) for item in found["imports"]] == [
        (2, "import os, sys as system"),
        (3, "from .helper import run as go"),
    ]
    (worker,) = found["classes"]
    assert (worker["qualname"], worker["line"], worker["end_line"]) == ("Worker", 7, 13)
    assert (worker["bases"], worker["decorators"]) == (["Base", "kind.Other"], ["wrapped(1)"])
    functions = {item["qualname"]: item for item in found["functions"]}
    assert list(functions) == ["Worker.size", "Worker.step", "Worker.step.<locals>.inner"]
    assert (
        functions["Worker.size"]["decorators"] == ["property"]
        and functions["Worker.size"]["signature"] == "(self) -> int"
    )
    step = functions["Worker.step"]
    assert step["is_async"] and step["signature"] == "(self, rows: list[int], *, deep=False, **rest)"
    assert [functions[name]["line"] for name in functions] == [9, 11, 12]


def test_grep_looks_at_names_and_calls_not_at_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["pkg.core", "--path", str(file.parents[1])]
    found = source(capsys, *place, "--grep", "go|inner|size")["matches"]
    assert {(item["kind"], item["line"], item["text"]) for item in found} >= {("call", 12, "go"), ("call", 13, "inner")}
    assert source(capsys, *place, "--grep", "gone|lost|comment")["matches"] == []
    assert source(capsys, *place, "--lines", "2:3")["text"] == [[2, TEXT.splitlines()[1]], [3, TEXT.splitlines()[2]]]


@pytest.fixture
def server(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    (file.parents[1] / "serve.py").write_text("print('up', flush=True)\ninput()\n")
    process = subprocess.Popen(
        [sys.executable, "serve.py"], cwd=file.parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    yield process
    process.communicate(b"\n")


def test_a_running_process_is_asked_for_its_own_module(
    server: subprocess.Popen[bytes], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = source(capsys, str(server.pid), "--module", "pkg.core")
    assert found["process"]["pid"] == server.pid and found["process"]["python"] == sys.executable
    assert found["outline"]["path"] == str(file)
    script = source(capsys, str(server.pid))
    assert script["outline"]["path"] == str(file.parents[1] / "serve.py")


@pytest.mark.parametrize("words", [["plan", "--engine", "specmeter"], ["source", "specmeter.eagle.worker"]])
def test_nothing_of_an_engine_is_imported(words: list[str]) -> None:
    """The embedded engine could be imported, and torch with it (the reader beside the server: see ``TEXT``)."""
    command = [sys.executable, "-X", "importtime", "-m", "specmeter", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPROFILEIMPORTTIME": "1"}, timeout=60)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "specmeter.commands" in imported and not {"torch", "specmeter.eagle.worker", "numpy"} & imported
