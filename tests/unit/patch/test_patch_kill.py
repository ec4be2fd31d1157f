"""A patch and its restore are killed at every step, and the tree ends byte for byte as it was."""

from __future__ import annotations

import os
import py_compile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specmeter.patch import operate
from specmeter.patch.state import APPLIED, CLEAN, ORIGINAL_BACK, UNFINISHED, look
from tests.support.killed import kill_at

FILES = {"start.py": b"pass\n", "link": b"/nowhere", "runtime/__init__.py": b"", "runtime/boot.py": b"x = 1\n"}
FACTS = {"id": "0badcafe", "link": "/nowhere"}
SOURCE = b'"""An engine."""\nfrom __future__ import annotations\n\nversion = 3\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def make_tree(folder: Path) -> Path:
    """A package with a compiled file that Python would never check again; its ``__init__``."""
    folder.mkdir()
    target = folder / "__init__.py"
    target.write_bytes(SOURCE)
    target.chmod(0o640)
    os.utime(target, ns=(10**18, 10**18 + 7))
    (folder / "other.py").write_bytes(b"y = 1\n")
    py_compile.compile(str(target), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return target


def snapshot(folder: Path) -> dict[str, Any]:
    """Every file and folder with bytes, mode, owner, inode and (of files) time."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        data = path.read_bytes() if path.is_file() else None
        kept = (info.st_mtime_ns, info.st_ino) if path.is_file() else None
        found[str(path.relative_to(folder))] = (data, info.st_mode, info.st_uid, info.st_gid, kept)
    return found


@pytest.fixture
def trees() -> Iterator[Path]:
    """A folder in memory where there is one: on a disk, each of the thousands of fsync calls takes its time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def each_step(
    trees: Path, prepare: Callable[[Path], None], operation: Callable[[Path], Any]
) -> list[tuple[int, Path, dict[str, Any]]]:
    """Trees in which ``operation`` was killed at step 1, 2, ... until it got through, with their first snapshots."""
    cases = []
    for step in range(1, 2000):
        folder = trees / f"engine{step}"
        target = make_tree(folder)
        before = snapshot(folder)
        prepare(target)
        killed = kill_at(step, lambda target=target: operation(target))  # type: ignore[misc]
        cases.append((step, target, before))
        if not killed:
            return cases
    raise AssertionError("it never got through")


def apply(target: Path) -> str:
    return operate.apply(str(target), FILES, FACTS)


def patched(target: Path) -> None:
    apply(target)


def restore(target: Path) -> str:
    return operate.restore(str(target))


def test_apply_killed_at_every_step_is_undone_by_restore(trees: Path) -> None:
    cases = each_step(trees, lambda target: None, apply)
    assert len(cases) > 100, "the hook must have met the steps"
    kinds = set()
    for step, target, before in cases:
        kind = look(str(target)).kind
        kinds.add(kind)
        if kind != APPLIED:
            assert target.read_bytes() == SOURCE, f"step {step}: no half a file"
        restore(target)
        assert snapshot(target.parent) == before, f"step {step} ({kind})"
    assert kinds == {CLEAN, UNFINISHED, ORIGINAL_BACK, APPLIED}, "every state must have been met"


def test_apply_killed_at_every_step_is_finished_by_apply(trees: Path) -> None:
    for step, target, before in each_step(trees, lambda target: None, apply):
        apply(target)
        assert look(str(target)).kind == APPLIED, f"step {step}"
        assert not list((target.parent / "__pycache__").glob("*")), f"step {step}: stale byte code"
        restore(target)
        assert snapshot(target.parent) == before, f"step {step}"


def test_restore_killed_at_every_step_is_finished_by_restore(trees: Path) -> None:
    def patched_and_imported(target: Path) -> None:
        apply(target)
        py_compile.compile(str(target), doraise=True)  # as a server does on import

    cases = each_step(trees, patched_and_imported, restore)
    assert len(cases) > 50
    for step, target, before in cases:
        restore(target)
        assert snapshot(target.parent) == before, f"step {step}"


def test_restore_killed_at_every_step_can_be_patched_again(trees: Path) -> None:
    for step, target, before in each_step(trees, patched, restore):
        apply(target)
        assert look(str(target)).kind == APPLIED, f"step {step}"
        restore(target)
        assert snapshot(target.parent) == before, f"step {step}"


def test_taking_our_lines_out_of_a_changed_file_killed_at_every_step(trees: Path) -> None:
    def patched_and_changed(target: Path) -> None:
        apply(target)
        target.write_bytes(target.read_bytes() + b"theirs = 1\n")

    def take_out(target: Path) -> str:
        return operate.restore(str(target), keep_changes=True)

    cases = each_step(trees, patched_and_changed, take_out)
    assert len(cases) > 50
    for step, target, _ in cases:
        assert target.read_bytes().endswith(b"theirs = 1\n"), f"step {step}: no half a file"
        take_out(target)
        assert target.read_bytes() == SOURCE + b"theirs = 1\n", f"step {step}"
        assert target.stat().st_mode & 0o7777 == 0o640, f"step {step}"
        assert sorted(path.name for path in target.parent.iterdir()) in (
            ["__init__.py", "__pycache__", "other.py"],
            ["__init__.py", "other.py"],
        ), f"step {step}: nothing of ours is left"
