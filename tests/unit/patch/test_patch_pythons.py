"""A patch as the interpreters see it: byte code of every kind, other versions of Python, folders that are links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specmeter.patch import client, operate
from specmeter.patch.state import look
from specmeter.recipes.far_program import program_command

FILES = {"start.py": b"import sys\nsys.modules[__name__ + '.ran'] = True\n", "link": b"/nowhere"}
FACTS = {"id": "0badcafe", "link": "/nowhere"}
SOURCE = b"version = 3\n"
OTHERS = [str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.[91]*/bin/python"))]
KINDS = ("TIMESTAMP", "CHECKED_HASH", "UNCHECKED_HASH")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "store" / "engine" / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(SOURCE)
    return path


def apply(path: Path) -> str:
    return operate.apply(str(path), FILES, FACTS)


def run(python: str, folder: Path, code: str, *options: str) -> str:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
    done = subprocess.run([python, *options, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def runs_the_start_program(python: str, target: Path, *options: str) -> bool:
    code = "import sys, engine; print('builtins.ran' in sys.modules, engine.version)"
    answer = run(python, target.parent.parent, code, *options)
    assert answer.endswith(" 3")
    return answer.startswith("True")


def compile_it(python: str, target: Path, kind: str, *options: str) -> None:
    code = f"import py_compile as p; p.compile({str(target)!r}, invalidation_mode=p.PycInvalidationMode.{kind})"
    run(python, target.parent.parent, code, *options)


def caches(target: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (target.parent / "__pycache__").glob("*")}


@pytest.mark.parametrize("kind", KINDS)
def test_byte_code_from_before_hides_nothing_and_comes_back(target: Path, kind: str) -> None:
    compile_it(sys.executable, target, kind)
    compile_it(sys.executable, target, kind, "-O")
    before = caches(target)
    assert len(before) == 2
    apply(target)
    for options in ([], ["-O"]):
        assert runs_the_start_program(sys.executable, target, *options), "an unchecked file would still be loaded"
    operate.restore(str(target))
    assert caches(target) == before
    for options in ([], ["-O"]):
        assert not runs_the_start_program(sys.executable, target, *options)


@pytest.mark.parametrize("kind", KINDS)
def test_byte_code_of_the_patched_file_goes_with_it(target: Path, kind: str) -> None:
    apply(target)
    compile_it(sys.executable, target, kind)
    operate.restore(str(target))
    assert caches(target) == {}
    assert not runs_the_start_program(sys.executable, target)


def ask(python: str, request: dict[str, Any]) -> dict[str, Any]:
    """The program beside the server, under that server's Python."""
    done = subprocess.run(
        program_command(python, client.FAR), input=json.dumps(request), capture_output=True, text=True, timeout=60
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert "ok" in answer, answer
    reply: dict[str, Any] = answer["ok"]
    return reply


@pytest.mark.parametrize("other", OTHERS, ids=lambda path: Path(path).parents[1].name)
def test_any_python_restores_what_another_has_patched(target: Path, other: str) -> None:
    for python in (sys.executable, other):
        compile_it(python, target, "UNCHECKED_HASH")
    before = (caches(target), target.stat().st_ino, target.stat().st_mtime_ns, target.stat().st_mode)
    files = {"start.py": "", "link": ""}
    for one, two in ((sys.executable, other), (other, sys.executable)):
        request = {"op": "apply", "path": str(target), "files": files, "facts": FACTS}
        assert ask(one, request)["outcome"] == "applied"
        assert ask(two, {"op": "look", "paths": [str(target)]})["states"][0]["kind"] == "applied"
        assert ask(two, request)["outcome"] == "already"
        assert ask(two, {"op": "restore", "path": str(target)})["outcome"] == "restored"
        assert (caches(target), target.stat().st_ino, target.stat().st_mtime_ns, target.stat().st_mode) == before
        assert target.read_bytes() == SOURCE
        assert not (target.parent / ".specmeter-patch").exists()


def test_site_packages_that_is_a_link_is_one_place_by_both_names(target: Path, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.symlink_to(target.parent.parent)
    linked = site / "engine" / "__init__.py"
    assert apply(linked) == "applied"
    assert look(str(linked)).path == str(target) and apply(target) == "already"
    assert runs_the_start_program(sys.executable, linked), "imported by the name that is a link"
    assert operate.restore(str(target)) == "restored" and operate.restore(str(linked)) == "already"
    assert target.read_bytes() == SOURCE and site.is_symlink()


def test_two_files_of_one_folder_come_off_one_by_one(target: Path) -> None:
    second = target.with_name("second.py")
    second.write_bytes(SOURCE)
    apply(target)
    apply(second)
    operate.restore(str(target))
    assert target.read_bytes() == SOURCE and look(str(second)).kind == "applied"
    assert operate.restore(str(second)) == "restored"
    assert sorted(path.name for path in target.parent.iterdir()) == ["__init__.py", "second.py"]
