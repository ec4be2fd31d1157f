"""compare on the real embedded engine: starts, order, verdict, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specmeter.trace.rundir import load

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
BASE = [sys.executable, "-m", "specmeter"]
SMALL = ["--requests", "2", "--blocks", "2", "--max-tokens", "16", "--threads", "1"]


def _run(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*BASE, *words], cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-3000:])
    return done


def test_one_start_a_side_is_inconclusive_and_tells_what_differs(tmp_path: Path) -> None:
    words = ["compare", "--arm", "baseline", "--arm", "fast:k=2,OMP_WAIT_POLICY=passive", "--starts", "1", *SMALL]
    document = json.loads(_run(*words, "--json", "--out", "run", cwd=tmp_path).stdout)["result"]
    (row,) = document["pairs"]
    assert row["verdict"] == "inconclusive across starts" and row["ratio"]["point"] > 0.1
    shown = {row["argument"]: row["values"] for row in document["differences"]}
    assert shown["flag.speculative-num-steps"] == {"baseline": "0", "fast": "2"}
    # Read from the server's own process.
    assert shown["env.OMP_WAIT_POLICY"]["fast"] == "passive"
    held = {(row["arm"], row["knob"]): row["holds"] for row in document["knobs"]}
    assert held["fast", "OMP_WAIT_POLICY"] is True
    assert document["arms"][1]["accept_length_tokens"] > 1
    saved = load(tmp_path / "run")
    assert saved.run["model"] == document["models"]["fast"]
    assert saved.run["status"] == "complete" and len(saved.requests["start"]) == 8
    assert "inconclusive across starts" in _run("report", "run", cwd=tmp_path).stdout


def test_equal_arms_in_the_same_starts_are_not_told_apart(tmp_path: Path) -> None:
    words = ["compare", "--arm", "a:k=2", "--arm", "b:k=2", "--together", "--starts", "3", *SMALL]
    document = json.loads(_run(*words, "--json", "--out", "run", cwd=tmp_path).stdout)["result"]
    (row,) = document["pairs"]
    assert row["paired_in_start"] and row["ratio"]["unit"] == "server start" and row["ratio"]["n"] == 3
    (output,) = [arm for arm in document["output"]["arms"] if arm["arm"] == "b"]
    assert output["equal"] == output["compared"] == 2


def test_bad_input_starts_nothing(tmp_path: Path) -> None:
    assert "two arms" in _run("compare", "--arm", "k=2", *SMALL, cwd=tmp_path, code=2).stderr
    assert "at least 2" in _run("compare", "--blocks", "1", cwd=tmp_path, code=2).stderr
    assert not (tmp_path / "specmeter-runs").exists()


def test_a_server_that_cannot_start_is_explained(tmp_path: Path) -> None:
    words = ["compare", "--arm", "server", "--arm", "bad:--no-such-flag=1", "--starts", "1", *SMALL]
    done = _run(*words, "--out", "run", cwd=tmp_path, code=4)
    assert "unknown arguments" in done.stderr and load(tmp_path / "run").run["status"] == "partial"
