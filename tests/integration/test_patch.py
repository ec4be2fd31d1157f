"""``specmeter patch`` on a real environment whose server no other route reaches: isolated mode, no variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmeter import cli
from specmeter.control import arm, disarm, find_link, processes, remove_link
from specmeter.control.link import links
from specmeter.patch import client
from specmeter.recipes.planner import survey
from tests.support.children import ask, running, until
from tests.support.recipes import cycle, install, point, recipe

RECIPE = recipe(
    cycle("fork.worker", "Worker.cycle"),
    point("verify.forward", "fork.worker", "Worker.cycle", call="verify$", inside="none", sites=1),
    engine="fork",
    dist="fork",
)
WORKER = """class Worker:
    def cycle(self, n):
        return self.verify(n)

    def verify(self, n):
        return n * 2
"""
SERVER = """
import sys
from fork.worker import Worker
worker, original = Worker(), Worker.cycle.__code__
print("ready", flush=True)
for line in sys.stdin:
    print(worker.cycle(int(line)), Worker.cycle.__code__ is original, flush=True)
"""
OTHER = RECIPE.replace('"fork"', '"spoon"').replace('"fork.worker"', '"spoon.worker"')  # another engine's
FEWER = RECIPE.partition('[[point]]\nname = "verify')[0]  # the same engine, one point
PYTHONS = [sys.executable, *sorted(map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python")))]


@pytest.fixture(params=PYTHONS, ids=lambda path: f"{len(path)}-{Path(path).parent.parent.name}")
def environment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A virtual environment that holds the engine ``fork`` 1.5; gives its python."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    subprocess.run([request.param, "-m", "venv", "--without-pip", str(tmp_path / "its venv")], check=True)
    (site,) = (tmp_path / "its venv").glob("lib/python*/site-packages")
    install(site, "fork", {"worker": WORKER}, init='"""An engine; its name is Jos\u00e9."""\n')
    (tmp_path / "my.toml").write_text(RECIPE)
    yield tmp_path / "its venv" / "bin" / "python"


def files_of(python: Path) -> dict[str, Any]:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    return {
        str(path.relative_to(site)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in site.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main(["patch", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_an_isolated_server_is_reached_armed_disarmed_and_restored(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, options = environment, ("--python", environment, "--recipe", tmp_path / "my.toml")
    before = files_of(python)
    code, answer = call(capsys, "plan", *options)
    assert code == 0 and files_of(python) == before, "planning changes nothing"
    (file,) = answer["result"]["files"]
    assert file["path"].endswith("fork/__init__.py") and file["modules"] == ["fork.worker"]

    code, answer = call(capsys, "apply", *options, "--link", "patched")
    assert code == 0 and list(answer["result"]["files"].values()) == ["applied"]
    assert call(capsys, "status")[0] == 1
    now = files_of(python)
    code, answer = call(capsys, "apply", *options)
    assert list(answer["result"]["files"].values()) == ["already"] and answer["result"]["link"] == "patched"
    assert files_of(python) == now

    link = find_link("patched")
    env = {"PATH": os.environ["PATH"]}  # nothing of ours
    with running(SERVER, env, str(python)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()
        assert ask(child, "1") == "2 True"
        (process,) = until(lambda: processes(link), "the runtime")
        assert process.report["modules"] == {"fork.worker": "ready"}
        assert arm(link).done[0].report["armed_points"] == [1, 2]
        assert ask(child, "2") == "4 False"
        assert not disarm(link).silent
        assert ask(child, "3") == "6 True"
        code, answer = call(capsys, "restore")
        assert code == 0 and files_of(python) == before
        assert any(str(child.pid) in warning for warning in answer["warnings"])
        assert ask(child, "4") == "8 True", "the running server goes on"
    code, answer = call(capsys, "status")
    assert (code, answer["result"]["files"]) == (0, [])
    assert not list(python.parents[1].rglob(".specmeter-patch"))


def test_isolated_mode_is_reached_too_and_a_missing_link_is_no_harm(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "apply", "--python", environment, "--recipe", tmp_path / "my.toml")
    link = find_link()

    def isolated() -> subprocess.CompletedProcess[str]:
        # With -I neither PYTHONPATH nor a sitecustomize of ours would be read.
        code = (
            "import sys; from fork.worker import Worker; print(Worker().cycle(2), '_specmeter_runtime' in sys.modules)"
        )
        return subprocess.run([str(environment), "-I", "-c", code], env={}, capture_output=True, text=True, timeout=120)

    done = isolated()
    assert (done.stdout, done.stderr) == ("4 True\n", "")
    assert len(processes(link)) == 1
    (link.path / "link.json").unlink()
    link.path.rename(tmp_path / "away")
    done = isolated()
    assert (done.stdout, done.stderr) == ("4 False\n", ""), "without its link the lines do nothing"
    # Applying again makes the link anew, under the same name: a machine that was started again has lost it.
    _, answer = call(capsys, "apply", "--python", environment, "--recipe", tmp_path / "my.toml")
    assert list(answer["result"]["files"].values()) == ["already"] and answer["result"]["path"] == str(link.path)
    assert isolated().stdout == "4 True\n"
    assert call(capsys, "restore")[0] == 0
    assert not link.path.exists(), "no server runs with it, so the link goes too"


def test_a_change_by_somebody_else_exits_with_3_and_the_difference(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "apply", "--python", environment, "--recipe", tmp_path / "my.toml")
    (target,) = environment.parents[1].glob("lib/python*/site-packages/fork/__init__.py")
    with target.open("a") as file:
        file.write("added = 1\n")
    code, answer = call(capsys, "restore")
    assert code == 3 and "+added = 1" in answer["error"]["why"] and "--keep-changes" in answer["error"]["next"]
    code, answer = call(capsys, "restore", "--keep-changes")
    assert code == 0 and target.read_text().endswith("\nadded = 1\n") and "specmeter" not in target.read_text()


def test_one_link_a_file_whoever_comes_second(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("apply", "--python", environment, "--recipe", tmp_path / "my.toml")
    planned = survey(environment, None, [tmp_path / "my.toml"])
    seen = client.targets_of(planned.plan, environment)  # as somebody saw it who comes second
    assert call(capsys, *words, "--link", "one")[0] == 0
    assert call(capsys, *words, "--link", "one")[0] == 0, "the same again is nothing to do"
    for when in ("after it", "at the same time"):
        code, answer = call(capsys, *words, "--link", "two")
        assert code == 3 and "for the link one" in answer["error"]["what"], when
        code, answer = call(capsys, *words)
        assert (code, answer["result"]["link"]) == (0, "one"), when
        assert list(answer["result"]["files"].values()) == ["already"]
        assert [link.id for link in links()] == ["one"]
        monkeypatch.setattr(client, "targets_of", lambda plan, python: seen)
    # Somebody else's link comes last: until it is there, it is being patched.
    remove_link(find_link("one"))
    monkeypatch.setattr(client, "LINK_S", 0.0)
    code, answer = call(capsys, *words)
    assert code == 3 and "Another specmeter is patching" in answer["error"]["what"] and not links()
    assert call(capsys, "restore", "--all")[0] == 0


def test_two_recipes_at_once(environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site,) = environment.parents[1].glob("lib/python*/site-packages")
    (site / "spoon").mkdir()
    (site / "spoon" / "__init__.py").write_text("")
    (site / "spoon" / "worker.py").write_text(WORKER)
    (site / "spoon-1.5.dist-info").mkdir()
    (site / "spoon-1.5.dist-info" / "METADATA").write_text("Version: 1.5\n")
    (tmp_path / "other.toml").write_text(OTHER)
    (tmp_path / "fewer.toml").write_text(FEWER)
    before = files_of(environment)
    for name, link in (("my", "one"), ("other", "two")):
        options = ("--python", environment, "--recipe", tmp_path / f"{name}.toml", "--link", link)
        assert call(capsys, "apply", *options)[0] == 0
    # The same engine for another plan: the processes would go on with the first one's.
    code, answer = call(capsys, "apply", "--python", environment, "--recipe", tmp_path / "fewer.toml")
    assert code == 3 and "another plan" in answer["error"]["what"]
    assert "places: 2" in answer["error"]["why"] and "places: 1" in answer["error"]["why"]
    run = "import fork.worker, spoon.worker; input()"
    with subprocess.Popen([environment, "-I", "-c", run], env={}, stdin=subprocess.PIPE) as child:
        # One runtime a process: the first patch that runs has it.
        until(lambda: processes(find_link("one")), "the runtime")
        child.communicate(b"\n")
    code, answer = call(capsys, "restore")
    assert code == 2 and "2 files are patched" in answer["error"]["what"], "which one is not guessed"
    (patched,) = site.glob("fork/__init__.py")
    assert call(capsys, "restore", patched)[0] == 0
    _, answer = call(capsys, "status")
    assert [Path(item["path"]).parent.name for item in answer["result"]["files"]] == ["spoon"]
    assert call(capsys, "restore", "--all")[0] == 0 and files_of(environment) == before
