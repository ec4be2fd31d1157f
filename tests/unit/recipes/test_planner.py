"""Plans: of the embedded engine as it is installed here, and of made-up engines that lack something."""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_recipe_schema import GOOD

from specmeter import cli, source
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.asking import ask_far
from specmeter.recipes.far_program import program_command
from specmeter.recipes.planner import build_plan, survey
from tests.support.recipes import install, recipe, runner
from tests.support.recipes import point as point_table

PYTHON = Path(sys.executable)
WORKER = "class Worker:\n    def cycle(self, batch):\n        return self.verify(batch), self.verify(batch)\n"
# Old and new interpreters that this machine may have; far.py must run under each.
OTHERS = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An unpacked engine named fork with its recipe beside it."""
    (tmp_path / "my.toml").write_text(GOOD)
    return install(tmp_path / "tree", "fork", {"worker": WORKER}, init="raise SystemExit('imported')\n")


def _env(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def _refusal(tree: Path, **changes: object) -> SpecmeterError:
    arguments = {"recipe": tree.parent / "my.toml", "env": _env(tree), **changes}
    with pytest.raises(SpecmeterError) as caught:
        build_plan(PYTHON, **arguments)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("engine", [None, "specmeter", "embedded"])
def test_the_embedded_engine(engine: str | None) -> None:
    planned = build_plan(PYTHON, engine)
    plan = planned.plan
    assert plan["engine"] == "specmeter"
    assert plan["refused"] == []
    ids = [point["id"] for point in plan["points"]]
    assert ids == list(range(1, len(ids) + 1))
    assert sorted(plan["value_ids"].values()) == list(range(len(ids) + 1, len(ids) + 1 + len(plan["value_ids"])))
    for point in plan["points"]:
        data = Path(point["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == point["sha256"]
        line = data.split(b"\n")[point["line"] - 1]
        assert line[point["col"] :].strip().startswith(point["text"].split("(")[0].encode())
    assert set(planned.code) == {point["module"] for point in plan["points"]}
    for module, blob in planned.code.items():
        content = marshal.loads(blob)
        assert content["module"] == module
        placed = {identity for function in content["functions"] for identity in function["points"]}
        assert placed == {point["id"] for point in plan["points"] if point["module"] == module}


def test_an_engine_on_the_servers_path_is_read_and_not_imported(tree: Path) -> None:
    planned = build_plan(PYTHON, recipe=tree.parent / "my.toml", env=_env(tree))
    assert [(point["name"], point["line"]) for point in planned.plan["points"]] == [
        ("cycle", 2),
        ("verify.forward", 3),
        ("verify.forward", 3),
    ]
    assert planned.plan["engine_version"] == "1.5"
    assert planned.code


@pytest.mark.parametrize("line", ["from .helper import {} as verify", "from fork.helper import {} as verify"])
@pytest.mark.parametrize(("function", "what"), [("later", "coroutine"), ("some", "generator"), ("now", "")])
def test_what_another_file_of_the_package_only_creates(tree: Path, line: str, function: str, what: str) -> None:
    (tree / "fork" / "helper.py").write_text("async def later(b): pass\ndef some(b): yield b\ndef now(b): return b\n")
    worker = WORKER.replace("self.verify", "verify")
    (tree / "fork" / "worker.py").write_text(f"{line.format(function)}\n{worker}")
    refused = build_plan(PYTHON, recipe=tree.parent / "my.toml", env=_env(tree)).plan["refused"]
    reason = f"the call only creates a {what}: nothing of its work happens there"
    assert [item["reason"] for item in refused] == ([reason, reason] if what else [])


def test_a_bare_tree_gives_no_code(tree: Path) -> None:
    planned = build_plan(PYTHON, recipe=tree.parent / "my.toml", path=tree)
    assert len(planned.plan["points"]) == 3
    assert planned.code == {}


def test_a_fork_with_renamed_classes(tree: Path) -> None:
    (tree / "fork" / "worker.py").write_text(WORKER.replace("Worker", "NewWorker"))
    error = _refusal(tree)
    assert error.exit is Exit.FINDING
    assert "no function Worker.cycle in fork.worker (nearest: NewWorker.cycle)" in error.why
    planned = survey(PYTHON, recipe=tree.parent / "my.toml", env=_env(tree))
    assert [item["name"] for item in planned.plan["refused"]] == ["cycle", "verify.forward"]
    assert planned.plan["runners"][0]["required_missing"] == ["cycle"]


def test_a_version_outside_every_range(tree: Path) -> None:
    error = _refusal(tree, engine="fork==0.9")
    assert error.exit is Exit.REFUSED
    assert "fork 0.9 is outside every range of its recipe: >=1" in error.what


def test_an_environment_without_the_engine(tree: Path) -> None:
    error = _refusal(tree, env=dict(os.environ))
    assert error.exit is Exit.ENVIRONMENT
    assert "no metadata of fork" in error.what
    shutil.rmtree(tree / "fork-1.5.dist-info")
    # Where the version is told, the files are looked for all the same.
    assert build_plan(PYTHON, "fork==1.5", tree.parent / "my.toml", _env(tree)).plan["engine_version"] == "1.5"
    error = _refusal(tree, engine="fork==1.5", env=dict(os.environ))
    assert error.exit is Exit.ENVIRONMENT and "no package of its recipe is there" in error.what and not error.why
    assert "--python" in error.next_step


def test_two_points_that_claim_one_call(tree: Path) -> None:
    second = GOOD.replace('name = "cycle"\nrole = "cycle"', 'name = "other"\nrole = "cycle"')
    (tree.parent / "second.toml").write_text(second)
    error = _refusal(tree, recipe=[tree.parent / "my.toml", tree.parent / "second.toml"])
    assert error.exit is Exit.USAGE
    assert "cycle and other both claim" in error.why
    assert f"{tree / 'fork' / 'worker.py'}:2" in error.why


def test_recipes_of_two_engines_do_not_mix(tree: Path) -> None:
    assert "different engines" in _refusal(tree, engine="vllm").what


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), ("#!/bin/sh\nexit 3\n", "code 3"), ("#!/bin/sh\necho no >&2\n", "no")],
)
def test_an_interpreter_that_does_not_work(tmp_path: Path, content: str | None, expected: str) -> None:
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(0o755)
    with pytest.raises(SpecmeterError) as caught:
        build_plan(python, "specmeter")
    assert caught.value.exit is Exit.ENVIRONMENT
    assert expected in caught.value.why


def test_a_broken_virtual_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "gone")
    with pytest.raises(SpecmeterError) as caught:
        build_plan(tmp_path / "bin" / "python", "specmeter")
    assert caught.value.exit is Exit.ENVIRONMENT


def test_an_unreadable_file_is_a_refusal_with_its_reason(tree: Path) -> None:
    (tree / "fork" / "worker.py").write_bytes(b"# coding: nonsense\n")
    assert "nonsense" in _refusal(tree).why
    (tree / "fork" / "worker.py").unlink()
    (tree / "fork" / "worker.py").symlink_to("worker.py")
    assert "fork" in _refusal(tree).why


def test_the_plan_of_one_runner_says_nothing_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = WORKER.replace("self.verify(batch), self.verify(batch)", "self.verify(batch)")
    tree = install(tmp_path / "tree", "two", {"worker": text})
    points = [point_table("cycle", "two.worker", "Worker.cycle", role="cycle")]
    points += [point_table("verify.forward", "two.worker", "Worker.cycle", runner="one", call=r"^self\.verify$")]
    points += [point_table("draft.forward", "two.worker", "Worker.gone", runner="other")]
    (tmp_path / "two.toml").write_text(recipe(runner("one"), runner("other"), *points, engine="two", dist="two"))
    words = ["plan", "--recipe", str(tmp_path / "two.toml"), "--path", str(tree)]
    assert cli.main(words) == 1
    assert "runner other: lacks 1 required point" in capsys.readouterr().out
    assert cli.main([*words, "--runner", "one"]) == 0
    out = capsys.readouterr().out
    assert "runner one: complete" in out and "other" not in out and "draft.forward" not in out
    assert cli.main([*words, "--runner", "one", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["result"]["runners"]] == ["one"]


@pytest.mark.parametrize("python", OTHERS, ids=lambda path: path.parts[-3])
def test_the_copied_folder_runs_under_every_python(python: Path, tree: Path, tmp_path: Path) -> None:
    version = tuple(int(part) for part in python.parts[-3].split("."))
    if version < (3, 9):
        with pytest.raises(SpecmeterError) as caught:
            build_plan(python, recipe=tree.parent / "my.toml", env=_env(tree))
        assert caught.value.exit is Exit.ENVIRONMENT
        return
    planned = build_plan(python, recipe=tree.parent / "my.toml", env=_env(tree))
    assert planned.plan["python"]["version"] == python.parts[-3]
    assert len(planned.plan["points"]) == 3
    # Copied elsewhere under another name, and started from a folder whose modules have the names of its own.
    copied = tmp_path / "elsewhere" / "reader"
    shutil.copytree(Path(source.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    request = '{"op": "locate", "module": "fork.worker"}'
    done = subprocess.run(
        program_command(python, copied / "far.py"),
        input=request, capture_output=True, text=True, env=_env(tree), cwd=tree,
    )  # fmt: skip
    assert str(tree / "fork" / "worker.py") in done.stdout, done.stderr


def test_far_leaves_its_own_folder_out_of_the_search() -> None:
    for module in ("anchors", "resolve", "source.anchors", "recipes.loader"):
        with pytest.raises(SpecmeterError, match="not in this environment"):
            ask_far(PYTHON, {"op": "locate", "module": module})


def test_plan_command(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(tree.parent / "my.toml")
    assert cli.main(["plan", "--recipe", recipe, "--path", str(tree)]) == 0
    shown = capsys.readouterr().out
    assert f"{tree / 'fork' / 'worker.py'}" in shown and "self.verify(batch)" in shown
    (tree / "fork" / "worker.py").write_text(WORKER.replace("cycle", "turn"))
    assert cli.main(["plan", "--recipe", recipe, "--path", str(tree)]) == 1
    assert "refused: cycle (required point): no function Worker.cycle" in capsys.readouterr().out
    assert cli.main(["recipe", "check", recipe, "--path", str(tree)]) == 1
    assert cli.main(["recipe", "check", recipe]) == 0
    (tree.parent / "bad.toml").write_text("schema = 3")
    assert cli.main(["recipe", "check", str(tree.parent / "bad.toml")]) == 1
    capsys.readouterr()
    assert cli.main(["recipe", "check", str(tree.parent / "none.toml")]) == 2, "no recipe is no finding about one"
    assert "No such file" in (said := capsys.readouterr().err) and "next: Name a recipe's file" in said
    assert cli.main(["plan", "--path", str(tree / "none"), "--engine", "vllm"]) == 2


def test_source_command(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tree / "fork" / "worker.py")
    assert cli.main(["source", path]) == 0
    shown = capsys.readouterr().out
    assert "class Worker" in shown and "def cycle(self, batch)" in shown
    assert cli.main(["source", "fork.worker", "--path", str(tree), "--grep", "verify$", "--lines", "2:3"]) == 0
    shown = capsys.readouterr().out
    assert "call     self.verify  in Worker.cycle" in shown and "     2     def cycle" in shown
    assert cli.main(["source", "fork.wrker", "--path", str(tree)]) == 5
    assert "Nearest: fork.worker" in capsys.readouterr().err
    assert cli.main(["source", path, "--lines", "9:2"]) == 2
