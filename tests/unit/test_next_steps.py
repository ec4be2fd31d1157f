"""What the command line says next: a near name, defaults in the help, where a page is, what undoes a patch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specmeter.cli import main
from specmeter.commands.patch import next_steps
from tests.support.saved_runs import save_run


@pytest.mark.parametrize(
    ("typed", "meant"), [("profil", "`specmeter profile`"), ("bnech", "`specmeter bench`"), ("xyzzy", "")]
)
def test_a_mistyped_command_is_told_of_its_neighbours(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed, "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert f"There is no command '{typed}'." in said and "invalid choice" not in said
    assert meant in said and ("Did you mean" in said) == bool(meant)


def test_serve_tells_its_defaults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    options = " ".join(capsys.readouterr().out.split()).partition("options:")[2].split(" --")
    for option, default in (
        ("num-steps", "(default: 2, or 0 without a draft head)"), ("eagle-topk", "(default: 1)"),
        ("num-draft-tokens", "(default: steps + 1 for a chain"), ("max-context", "(default: 4096)"),
        ("max-queue", "(default: 64)"),
    ):  # fmt: skip
        assert any(option in each and default in each for each in options), option


def test_a_page_is_named_with_its_whole_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), "--html", "page.html"]) == 0
    assert capsys.readouterr().out == f"saved: {os.path.realpath(tmp_path)}/page.html\n"


def test_a_patch_names_what_comes_next() -> None:
    said = next_steps("mine", ["/a b/x.pth"], armed=False)
    assert "`specmeter arm --link mine`" in said and "`specmeter patch restore '/a b/x.pth'`" in said
    assert "specmeter arm" not in next_steps("mine", ["/x"], armed=True)
