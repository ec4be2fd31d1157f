"""tune on the real embedded engine: a whole run, an infeasible point, an interruption and its resumption, bad input."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specmeter.engines.guardian import descendants
from specmeter.trace.rundir import load

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
BASE = [sys.executable, "-m", "specmeter"]
SMALL = ["--requests", "2", "--blocks", "3", "--max-tokens", "12", "--threads", "1", "--confirm-blocks", "2"]


@pytest.fixture(scope="module", autouse=True)
def running_before() -> frozenset[int]:
    """What other files left for good: multiprocessing's resource tracker ends with the whole suite."""
    return frozenset(descendants(os.getpid()))


def _run(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*BASE, *words], cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-3000:])
    return done


def test_a_whole_tune_names_a_winner_that_can_be_started(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text("[space]\nsteps = [1, 6]\n")
    words = ["tune", "--space", "space.toml", "--confirm", "1", *SMALL, "--json", "--out", "run"]
    document = json.loads(_run(*words, cwd=tmp_path).stdout)["result"]
    (level,) = document["levels"]
    tried = {row["label"] for row in level["search"]["tried"]}
    # The command's own setting is the starting point though the space does not name it.
    assert tried == {"baseline", "k=1", "k=2", "k=6"} and level["search"]["starts"] == 1
    assert level["starting_point"] == "k=2"
    assert level["proof"]["pairs"][0]["verdict"] == "inconclusive across starts"
    saved = load(tmp_path / "run")
    assert saved.run["status"] == "complete" and saved.analysis == document
    assert "left out of the space" in _run("report", "run", cwd=tmp_path).stdout
    small = ["--requests", "1", "--max-tokens", "8", "--json", "--out", "bench"]
    _run("bench", "--server", "run/tuned.toml", *small, cwd=tmp_path)


def test_points_that_cannot_run_are_kept_with_the_logs_cause(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        '[space]\nsteps = [1]\n[space.flags]\n"--draft" = ["default", "/no/such/head"]\n'
    )
    words = ["tune", "--space", "space.toml", "--confirm", "0", *SMALL, "--json", "--out", "run"]
    document = json.loads(_run(*words, cwd=tmp_path).stdout)["result"]
    search = document["levels"][0]["search"]
    assert search["infeasible"] and all("/no/such/head" in row["label"] for row in search["infeasible"])
    assert "ended before it was ready" in search["infeasible"][0]["cause"]
    assert "/no/such/head" not in document["levels"][0]["winner"]["label"]


def test_a_server_that_never_starts_is_an_error(tmp_path: Path) -> None:
    done = _run("tune", *SMALL, "--draft", "/no/such/head", "--out", "run", cwd=tmp_path, code=4)
    assert "feasible" in done.stderr or "not start" in done.stderr


def test_a_trial_that_hangs_is_killed_and_told(tmp_path: Path) -> None:
    words = ["tune", *SMALL, "--trial-timeout", "0.3", "--trials", "1", "--out", "run"]
    done = _run(*words, cwd=tmp_path, code=4)
    assert "it hung: not done after 0.3 s" in done.stderr and "feasible" in done.stderr


def test_a_model_name_that_is_not_served_is_no_candidates_fault(tmp_path: Path) -> None:
    words = ["tune", *SMALL, "--model-name", "nobody", "--out", "run"]
    assert "does not serve a model named nobody" in _run(*words, cwd=tmp_path, code=2).stderr
    assert _trials(tmp_path / "run" / "journal.sqlite") == 0


def test_a_proving_start_that_fails_keeps_the_report(tmp_path: Path) -> None:
    """The third start of this server fails: the search's one and the proof's first are there."""
    server = tmp_path / "server.sh"
    server.write_text(
        f'#!/bin/sh\ncase "$*" in *--help*) ;; *) echo >> {tmp_path}/starts\n'
        f'[ $(wc -l < {tmp_path}/starts) -lt 3 ] || {{ echo "no more memory"; exit 1; }};; esac\n'
        f'exec {sys.executable} -m specmeter serve "$@"\n'
    )
    server.chmod(0o700)
    (tmp_path / "space.toml").write_text("[space]\nsteps = [1]\n")
    words = ["tune", "--space", "space.toml", "--confirm", "1", "--requests", "1", "--blocks", "2", "--max-tokens", "8"]
    command = [str(server), "--threads", "1", "--speculative-num-steps", "1"]
    said = ["--confirm-blocks", "2", "--engine", "embedded", "--json", "--out", "run", "--", *command]
    answer = json.loads(_run(*words, *said, cwd=tmp_path).stdout)
    (level,) = answer["result"]["levels"]
    assert level["search"]["tried"] and level["winner"]["label"] in ("k=1", "baseline")
    assert (
        level["missing"].startswith("the proof ended at start 2 of 2") and "not proven" in level["verdict"]["sentence"]
    )
    assert answer["warnings"] == [f"1 requests at once: {level['missing']}"]
    assert (
        level["missing"][:40] in _run("report", "run", cwd=tmp_path).stdout and (tmp_path / "run/tuned.toml").is_file()
    )
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as database:
        kinds = {kind for (kind,) in database.execute("SELECT kind FROM events")}
    assert kinds == {"trial"}  # a later session proves it


def test_interrupted_twice_leaves_nothing_running_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text('[space]\nsteps = [1]\n[space.env]\nUNUSED_KNOB = ["default", "1"]\n')
    words = ["tune", "--space", "space.toml", "--confirm", "0", *SMALL]
    process = subprocess.Popen([*BASE, *words, "--out", "first"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "first" / "journal.sqlite"
    _wait(lambda: _trials(journal) > 0, 120)
    _wait(lambda: len(descendants(process.pid)) > 1, 30)
    running = descendants(process.pid)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, said = process.communicate(timeout=100)
    # The second Ctrl-C may meet the interpreter at its very end, after all is stopped: the shell then says 130 as well.
    assert process.returncode in (130, -signal.SIGINT) and "Go on with --journal" in said, said
    _wait(lambda: not any(_alive(pid) for pid in running), 40)
    before = _trials(journal)
    again = _run(*words, "--journal", "first", "--out", "second", cwd=tmp_path)
    assert _trials(journal) > before
    begun = [line for line in again.stderr.splitlines() if line.startswith("trial ")]
    assert begun and begun[0].startswith("trial 2: "), again.stderr
    # Other work on the same journal is refused: its numbers are not comparable.
    other = [word if word != "12" else "13" for word in words]
    assert "other work" in _run(*other, "--journal", "first", "--out", "third", cwd=tmp_path, code=3).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:1", "--engine", "embedded"], "needs the command"),
        (["--space", "none.toml"], "cannot be read"),
        (["--concurrency", "0"], "from 1 on"),
        (["--minutes", "-1"], "above 0"),
        (["--blocks", "1"], "at least 2"),
        (["--draft", "none"], "no draft head"),
        (["--prompts", "broken.jsonl"], "line 2"),
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    assert said in _run("tune", *words, cwd=tmp_path, code=2).stderr
    assert not (tmp_path / "specmeter-runs").exists()


def _trials(journal: Path) -> int:
    try:
        with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as database:
            return int(database.execute("SELECT count(*) FROM events WHERE kind = 'trial'").fetchone()[0])
    except sqlite3.Error:
        return 0


def _wait(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def test_nothing_of_this_file_is_left_running(running_before: frozenset[int]) -> None:
    left = [pid for pid in descendants(os.getpid()) if pid not in running_before and _alive(pid)]
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
