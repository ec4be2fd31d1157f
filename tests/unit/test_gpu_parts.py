"""The runner of resumable parts: done stays done, what hangs or fails is ended, a killed call is taken up again.

Each call is a process of its own, as on the lent machine; the runner ends everything below its own process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(ROOT / "src")!r}]
import gpu_parts
from gpu_parts import Part, run_parts
gpu_parts.CLOSING_S, gpu_parts._GRACE_S = 0.5, 0.3
WORK = Path(sys.argv[1])

def note(text):
    with (WORK / "notes").open("a") as file:
        file.write(text + "\\n")

def simple(results):
    note(results.name)
    (results / "answer").write_text("42")
"""


class Runner:
    """Writes the script once and calls it as often as asked."""

    def __init__(self, folder: Path, body: str, budget_s: float = 200.0, closing: str = "None") -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self.script = folder / "parts.py"
        self.script.write_text(f"{HEAD}\n{body}\nsys.exit(run_parts(PARTS, WORK, {budget_s}, {closing}))\n")

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.script), str(self.work)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def call(self) -> tuple[int, str]:
        process = self.start()
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def notes(self) -> list[str]:
        path = self.work / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def attempts(self) -> list[str]:
        lines = (self.work / "parts.jsonl").read_text().splitlines()
        return [entry["begun"] for line in lines if "begun" in (entry := json.loads(line))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def until(what: str, check: object, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_parts_run_in_order_once_and_closing_at_every_call(tmp_path: Path) -> None:
    body = 'PARTS = [Part("one", simple, 20), Part("two", simple, 20, needs=("one",))]'
    runner = Runner(tmp_path, body, closing='lambda work: note("closing")')
    assert runner.call()[0] == 0
    assert runner.call()[0] == 0
    assert runner.notes() == ["one", "two", "closing", "closing"]
    assert (runner.work / "results" / "one" / "answer").read_text() == "42"
    assert json.loads((runner.work / "done" / "two.json").read_text())["name"] == "two"
    assert not (runner.work / "done" / "closing.json").exists()


def test_a_part_that_hangs_is_ended_at_its_limit_with_all_it_started(tmp_path: Path) -> None:
    body = """
def hang(results):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    note(f"{os.getpid()} {child.pid}")
    time.sleep(999)
PARTS = [Part("hang", hang, 6), Part("after", simple, 20, needs=("hang",)), Part("free", simple, 20)]
"""
    runner = Runner(tmp_path, body)
    code, said = runner.call()
    assert code == 75, said
    assert "hang: failed, ended after its limit" in said and "after: left out, hang not done" in said
    pids = [int(pid) for pid in runner.notes()[0].split()]
    assert len(pids) == 2 and not any(map(alive, pids))
    assert runner.notes()[1:] == ["free"]


def test_a_failing_part_shows_its_traceback_and_is_given_up_after_three_attempts(tmp_path: Path) -> None:
    body = """
def fail(results):
    note("try")
    raise RuntimeError("the server said no")
PARTS = [Part("fail", fail, 20), Part("after", simple, 20, needs=("fail",))]
"""
    runner = Runner(tmp_path, body)
    code, said = runner.call()
    assert code == 75 and "RuntimeError: the server said no" in said and "fail: failed, exit 1" in said
    assert [runner.call()[0] for _ in range(3)] == [75, 1, 1]
    assert runner.notes() == ["try"] * 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_killed_is_taken_up_again_where_it_was(tmp_path: Path, number: int) -> None:
    body = """
def slow(results):
    note(str(os.getpid()))
    while not (WORK / "go").exists():
        time.sleep(0.02)
PARTS = [Part("one", simple, 20), Part("slow", slow, 100), Part("last", simple, 20)]
"""
    runner = Runner(tmp_path, body, closing='lambda work: note("closing")')
    process = runner.start()
    until("the slow part runs", lambda: len(runner.notes()) == 2)
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    part = int(runner.notes()[1])
    until("the part ends with its call", lambda: not alive(part))
    # A kill leaves no time to close; a polite end does.
    assert runner.notes()[2:] == (["closing"] if number == signal.SIGTERM else [])
    (runner.work / "go").touch()
    assert runner.call()[0] == 0
    assert runner.attempts() == ["one", "slow", "slow", "last"]


def test_what_does_not_fit_is_left_for_the_next_call(tmp_path: Path) -> None:
    body = """
def long(results):
    time.sleep(4)
PARTS = [Part("long", long, 20), Part("more", simple, 20)]
"""
    runner = Runner(tmp_path, body, budget_s=23.0)
    code, said = runner.call()
    assert code == 75 and "more: 20 s do not fit" in said and "left: more" in said
    assert runner.call()[0] == 0


def test_parts_that_can_never_run_are_refused_before_anything_starts(tmp_path: Path) -> None:
    wrong = {
        'Part("a", simple, 5, needs=("b",)), Part("b", simple, 5)': "needs ['b']",
        'Part("a", simple, 5), Part("a", simple, 5)': "names are unique",
        'Part("a/b", simple, 5)': "names are unique",
        'Part("a", simple, 999)': "999 s never fit into a call",
    }
    for number, (parts, words) in enumerate(wrong.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        runner = Runner(folder, f"PARTS = [{parts}]")
        code, said = runner.call()
        assert code == 1 and words in said and not runner.notes()


def test_a_second_call_at_once_is_refused(tmp_path: Path) -> None:
    body = """
def slow(results):
    note("slow")
    while not (WORK / "go").exists():
        time.sleep(0.02)
PARTS = [Part("slow", slow, 100)]
"""
    runner = Runner(tmp_path, body)
    first = runner.start()
    until("the first call runs", lambda: runner.notes() == ["slow"])
    code, said = runner.call()
    assert code == 1 and "another call runs" in said
    (runner.work / "go").touch()
    assert first.communicate(timeout=30) is not None and first.returncode == 0
