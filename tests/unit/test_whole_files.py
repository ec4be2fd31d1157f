"""Files that a user names: whole or not at all, never through a link that somebody else put beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specmeter.cli import main
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.whole import write_whole
from tests.support.saved_runs import save_run


def test_a_link_that_waits_for_the_page_is_not_followed(tmp_path: Path) -> None:
    run, shared = save_run(tmp_path / "run"), tmp_path / "shared"
    shared.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (".page.html.part", f".page.html.{os.getpid()}.part"):
        (shared / name).symlink_to(victim)
    assert main(["report", str(run), "--html", str(shared / "page.html")]) == 0
    page = shared / "page.html"
    assert victim.read_text() == "mine" and page.read_text().startswith("<!doctype html>")
    assert page.stat().st_mode & 0o777 == 0o600 and not page.is_symlink()
    assert sorted(p.name for p in shared.iterdir() if not p.is_symlink()) == ["page.html"]


@pytest.mark.parametrize("name", [".", "/", "folder"])
def test_a_directory_is_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["metrics", str(run), "--textfile", name]) == 2
    said = capsys.readouterr().err
    assert "names no file" in said and "Name a file, as in" in said
    assert sorted(tmp_path.iterdir()) == before


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_whole(path, "old")
    with pytest.raises(SpecmeterError, match="cannot be written") as caught:
        write_whole(tmp_path / "none" / "a", "x")
    assert caught.value.exit is Exit.ENVIRONMENT and caught.value.why and caught.value.next_step
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]
