"""What a command puts before Python's search path: held against Python itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specmeter.control.launch import behind_env, first_on_path, interpreter_of
from specmeter.source.process import started_first

PRINT = "import json, sys; print(json.dumps(sys.path))"
COMMANDS = [
    ["sub/go.py"], ["link.py"], ["-u", "sub/go.py", "-I"], ["-W", "ignore", "sub/go.py"],
    ["-Wignore", "-uX", "dev", "sub/go.py"],
    ["-m", "mod"], ["-mmod"], ["-c", PRINT], ["-uc", PRINT, "-P"], ["-I", "sub/go.py"], ["-uI", "-c", PRINT],
    ["folder"], ["-I", "folder"], ["-E", "sub/go.py"], ["-"],
]  # fmt: skip
SAFE = [["-P", "sub/go.py"], ["-uP", "-c", PRINT], ["-Pm", "json"]] if sys.version_info >= (3, 11) else []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for folder in ("sub", "folder"):
        (tmp_path / folder).mkdir()
    for name in ("sub/go.py", "mod.py", "folder/__main__.py"):
        (tmp_path / name).write_text(PRINT)
    (tmp_path / "link.py").symlink_to("sub/go.py")
    return tmp_path


@pytest.mark.parametrize("safe", ["", "1"])
def test_as_python_itself_does(place: Path, safe: str) -> None:
    env = {**os.environ, "PYTHONSAFEPATH": safe}
    env.pop("PYTHONPATH", None)
    plain = json.loads(subprocess.check_output([sys.executable, "-I", "-c", PRINT]))
    for words in [*COMMANDS, *SAFE[:2]]:
        done = subprocess.run([sys.executable, *words], cwd=place, env=env, input=PRINT, capture_output=True, text=True)
        # `-m mod` finds nothing where the folder is not on the path.
        assert done.returncode == 0 or "No module named mod" in done.stderr
        own = [entry or str(place) for entry in json.loads(done.stdout or "[]") if entry not in plain]
        assert own == list(started_first(["python", *words], str(place), env)[1]), words


def test_through_env_and_a_console_script(place: Path) -> None:
    script = place / "sub" / "serve"
    script.write_text(f"#!{sys.executable}\n{PRINT}\n")
    script.chmod(0o700)
    env = {"PATH": os.environ["PATH"]}
    assert first_on_path([str(script), "model"], env, "/") == (str(script.parent),)
    assert first_on_path(["env", "A=1", "python3", "go.py"], env, str(place)) == (str(place),)
    assert first_on_path(["env", "PYTHONSAFEPATH=1", "python3", "-m", "mod"], env, str(place)) == ()
    # Its own options end where the command begins: the others are Python's.
    alone = first_on_path(["python3", "-P", "-m", "mod"], env, str(place))
    assert alone == first_on_path(["env", "A=1", "python3", "-P", "-m", "mod"], env, str(place))
    words = ["env", "-u", "B", "-i", "A=1", "python3", "-W", "ignore", "sub/go.py", "x=y"]
    assert first_on_path(words, env, str(place)) == (str(place / "sub"),)
    assert behind_env(words) == ({"A": "1"}, words[5:])
    assert interpreter_of(words, env) == interpreter_of(["python3"], env)
    script.write_text(f"#!{sys.executable} -I\n{PRINT}\n")
    assert first_on_path([str(script)], env, "/") == () == first_on_path(["/bin/ls"], env, "/")
