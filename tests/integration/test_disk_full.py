"""A run whose disk fills up: the report is still printed, the error is plain, and nothing half-written is left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specmeter.trace.rundir import RunWriter
from specmeter.trace.whole import NotSaved, whole

BASE = [sys.executable, "-m", "specmeter"]
WORDS = ["--requests", "2", "--max-tokens", "8", "--threads", "1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB; the rings alone are larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.engine
@pytest.mark.timeout(420)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_profile_on_a_full_disk_is_printed_and_says_what_was_not_saved(small_disk: Path, form: list[str]) -> None:
    run = small_disk / "run"
    words = [*BASE, "profile", *WORDS, "--steps", "2", "--baseline", "none", "--out", str(run), *form]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 5, done.stderr[-2000:]
    assert "could not be saved whole" in done.stderr and str(run) in done.stderr
    assert os.strerror(errno.ENOSPC) in done.stderr and "--out" in done.stderr and "Traceback" not in done.stderr
    if form:
        answer = json.loads(done.stdout)
        assert answer["result"]["kind"] == "profile" and "could not be saved" in answer["warnings"][-1]
    else:
        assert "Where the cycle goes" in done.stdout and "saved:" not in done.stdout
    assert not [path for path in run.rglob("*") if ".part" in path.name]
    assert json.loads((run / "run.json").read_text())["status"] == "partial"


def test_every_write_of_a_run_leaves_nothing_half_written(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "9-1.ring").write_bytes(bytes(1 << 20))
    writer = RunWriter.create(small_disk / "run", ["specmeter"])
    for write in (lambda: writer.save_rings(tmp_path), lambda: writer.write_report("x" * (1 << 20))):
        with pytest.raises(NotSaved, match="could not be saved whole"):
            write()
        with writer.postponing():
            write()
    assert writer.failure is not None and not list(writer.path.rglob("*.part*"))
    writer.finish("complete")
    assert json.loads((writer.path / "run.json").read_text())["status"] == "partial"
    with pytest.raises(NotSaved):
        writer.raise_failure()


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole(tmp_path / "a", tmp_path / ".a.part") as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]
