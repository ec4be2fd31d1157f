"""Two controllers at one server: real processes that hold, arm, disarm, and die."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from specmeter import cli
from specmeter.control import Link, arm, disarm, holder
from tests.support.children import ask, environment, running
from tests.support.toy import Mark, make_toy

SOURCE = "def leaf(x):\n    return x\n\ndef cycle(x):\n    return leaf(x)\n"
CONTROLLER = """
import os, sys
from pathlib import Path
from specmeter.control import open_link, arm, disarm
from specmeter.errors import SpecmeterError

link = open_link(Path(sys.argv[1])) if len(sys.argv) > 1 else open_link(Path(os.environ["LINK"]))
for line in sys.stdin:
    try:
        print(repr(eval(line)) and "done", flush=True)
    except SpecmeterError as error:
        print(int(error.exit), str(error).replace(chr(10), " "), flush=True)
"""
SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def link(tmp_path: Path) -> Link:
    return make_toy(tmp_path, "toymod", SOURCE, [Mark("cycle", role="cycle"), Mark("leaf")]).link(tmp_path / "links")


def controller(link: Link, **extra: str) -> dict[str, str]:
    return {**environment(None, SRC), "LINK": str(link.path), **extra}


ALICE = {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.9 22"}
BOB = {"SSH_CONNECTION": "10.0.0.2 5000 10.0.0.9 22"}


def test_the_second_controller_is_refused_and_told_who_where_and_since_when(link: Link) -> None:
    with running(CONTROLLER, controller(link, **ALICE)) as alice, running(CONTROLLER, controller(link, **BOB)) as bob:
        assert ask(alice, "arm(link)") == "done"
        said = ask(bob, "arm(link)")
        assert said.startswith("3 ") and "ssh from 10.0.0.1" in said and f"process {alice.pid}" in said
        assert ask(bob, "disarm(link)").startswith("3 ")
        assert ask(alice, "arm(link)") == "done", "its own, again"
        assert holder.holder(link)["pid"] == alice.pid  # type: ignore[index]
        assert ask(alice, "disarm(link)") == "done"
        assert ask(bob, "arm(link)") == "done"
        assert ask(bob, "disarm(link)") == "done"
        assert holder.holder(link) is None


def test_an_arming_outlives_its_command_and_is_still_somebodys(link: Link) -> None:
    with running(CONTROLLER, controller(link, **ALICE)) as alice:
        ask(alice, "arm(link)")
    with running(CONTROLLER, controller(link, **BOB)) as bob:
        said = ask(bob, "arm(link)")
        assert said.startswith("3 ") and "armed by somebody else" in said and "--take-over" in said
        assert holder.holder(link) is None, "a refusal leaves no lock"
        assert ask(bob, "arm(link, take_over=True)") == "done"
    with running(CONTROLLER, controller(link, **ALICE)) as alice:
        assert ask(alice, "arm(link)").startswith("3 ")
        assert ask(alice, "disarm(link)") == "done", "taking probes out is free where no controller runs"
        assert ask(alice, "arm(link)") == "done"


def test_a_killed_controller_that_beats_leaves_nothing_behind(link: Link) -> None:
    with running(CONTROLLER, controller(link, **ALICE)) as alice:
        assert ask(alice, "arm(link, 5.0, 30.0)") == "done"
        os.kill(alice.pid, signal.SIGKILL)
        alice.wait()
    with running(CONTROLLER, controller(link, **BOB)) as bob:
        assert ask(bob, "arm(link)") == "done"
        assert link.document()["state"]["watchdog_s"] == 0.0, "nobody beats for this arming"


def test_only_one_of_many_at_the_same_moment(link: Link) -> None:
    code = CONTROLLER.replace("sys.stdin", "['arm(link)']") + "\nsys.stdin.read()\n"
    env = [controller(link, SSH_CONNECTION=f"10.0.1.{number} 1 1 1") for number in range(6)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for each in env
    ]
    said = [child.stdout.readline() for child in children]  # type: ignore[union-attr]
    for child in children:
        child.communicate("")
    assert sorted(line[:2] for line in said) == ["3 "] * 5 + ["do"]


def test_status_shows_who_armed_and_reading_along_is_free(
    link: Link, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(CONTROLLER, controller(link, **ALICE)) as alice:
        ask(alice, "arm(link)")
        assert cli.main(["status", "--link", str(link.path)]) == 0
        text = capsys.readouterr().out
        assert "armed by" in text and "ssh from 10.0.0.1" in text and "still running" in text
        assert cli.main(["arm", "--link", str(link.path)]) == 3
    capsys.readouterr()
    assert cli.main(["status", "--json", "--link", str(link.path)]) == 0
    result = json.loads(capsys.readouterr().out)["result"]["links"][0]
    assert result["armed_by"]["address"] == "10.0.0.1" and result["controller"] is None


def test_who_only_looks_does_not_keep_a_controller_out(link: Link) -> None:
    """`status` on a busy machine may be stopped for long between taking its shared lock and giving it back."""
    arm(link)
    disarm(link)
    looking = os.open(link.path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    end = threading.Timer(0.5, os.close, (looking,))
    end.start()
    arm(link)
    disarm(link)
    end.join()


def test_this_process_arms_and_disarms_as_ever(link: Link) -> None:
    arm(link)
    arm(link)
    disarm(link)
    assert holder.holder(link) is None and link.document()["state"]["armed_by"] is None


def test_a_killed_controller_gives_the_lock_back_and_its_arming_is_still_told(link: Link) -> None:
    with running(CONTROLLER, controller(link, **ALICE)) as alice, running(CONTROLLER, controller(link, **BOB)) as bob:
        assert ask(alice, "arm(link)") == "done"
        assert ask(bob, "arm(link)").startswith("3 ")
        os.kill(alice.pid, signal.SIGKILL)
        alice.wait()
        assert (link.path / "lock").stat().st_size > 0 and holder.holder(link) is None, (
            "the file says nothing by itself"
        )
        said = ask(bob, "arm(link)")
        assert said.startswith("3 ") and f"process {alice.pid}" in said and "since 20" in said and "--take-over" in said
        assert ask(bob, "arm(link, take_over=True)") == "done"
        who = holder.holder(link)
        assert who is not None and who["pid"] == bob.pid
        os.kill(bob.pid, signal.SIGKILL)
        bob.wait()
        # Whatever a kill left in the file, the next one takes it.
        (link.path / "lock").write_bytes(b'{"user": "al')
        assert disarm(link) is not None and holder.holder(link) is None


def on(who: dict[str, str], *words: str) -> tuple[int, dict[str, Any]]:
    """The command by ``--on``, through an exec prefix that gives the far side another SSH client's address."""
    prefix = " ".join(["env", *(f"{name}='{value}'" for name, value in who.items())])
    command = [sys.executable, "-m", "specmeter", "--on", prefix, "--far-python", sys.executable, *words, "--json"]
    done = subprocess.run(command, env={**environment(None, SRC)}, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_two_people_over_on(link: Link) -> None:
    at = ("--link", str(link.path))
    assert on(ALICE, "arm", *at)[0] == 0
    code, answer = on(BOB, "arm", *at)
    assert code == 3 and "ssh from 10.0.0.1" in answer["error"]["why"] and "since 20" in answer["error"]["why"]
    code, answer = on(BOB, "status", *at)
    (told,) = answer["result"]["links"]
    assert code == 0 and told["armed_by"]["address"] == "10.0.0.1" and told["controller"] is None
    assert on(BOB, "arm", *at, "--take-over")[0] == 0
    assert on(BOB, "status", *at)[1]["result"]["links"][0]["armed_by"]["address"] == "10.0.0.2"
    with running(CONTROLLER, controller(link, **BOB)) as bob:
        assert ask(bob, "arm(link)") == "done"
        code, answer = on(ALICE, "disarm", *at)
        assert code == 3 and "under the control of somebody else" in answer["error"]["what"]
        assert f"process {bob.pid}" in answer["error"]["why"]
        _, answer = on(ALICE, "status", *at)
        assert answer["result"]["links"][0]["controller"]["pid"] == bob.pid
        os.kill(bob.pid, signal.SIGKILL)
        bob.wait()
    assert on(ALICE, "disarm", *at)[0] == 0
    assert link.document()["state"]["armed_by"] is None
