"""The run at 4 and 8 GPUs rehearsed on miniature ranks: killed in the middle, taken up again, and its report."""

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


def rehearse(work: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "eight_gpu.py"), "rehearse", str(work), "--tp", "2", *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    env.pop("OUT", None)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def servers_of(work: Path) -> list[int]:
    """Living processes whose command names this rehearsal's port-bearing front, by their link below ``work``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if str(work).encode() in environ and state not in (b"Z", b"X"):
                found.append(int(entry.name))
    return found


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


def test_a_killed_rehearsal_is_taken_up_and_reports_ranks_and_ratios(work: Path) -> None:
    first = rehearse(work)
    deadline = time.monotonic() + 200
    while not (work / "done" / "mini-tp2.plain.1.json").exists():
        assert first.poll() is None and time.monotonic() < deadline, first.communicate(timeout=5)[0]
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=30)
    deadline = time.monotonic() + 60
    while servers_of(work):
        assert time.monotonic() < deadline, servers_of(work)
        time.sleep(0.1)
    second = rehearse(work)
    said = second.communicate(timeout=280)[0]
    assert second.returncode == 0, said
    lines = (work / "parts.jsonl").read_text().splitlines()
    begun = [entry["begun"] for line in lines if "begun" in (entry := json.loads(line))]
    assert begun.count("mini-tp2.plain.1") == 1 and set(begun) == {
        f"mini-tp2.{a}.1" for a in ("plain", "default", "tuned")
    }
    found = json.loads((work / "eight.json").read_text())["mini-tp2"]
    arms = {row["arm"]: row for row in found["arms"]}
    assert set(arms) == {"plain", "default", "tuned"} and all(row["starts"] == 1 for row in arms.values())
    assert all(arms[name]["over_plain"]["n"] == 3 and arms[name]["tok_s"] > 0 for name in ("default", "tuned"))
    run = found["runs"]["default.1"]
    assert [row["rank"] for row in run["ranks"]] == [0, 1]
    assert run["straggler"]["rank"] == 1
    skew = run["rank_skew"]
    assert skew["arrivals"][0]["calls"] == pytest.approx(5, abs=0.2)
    assert skew["arrivals"][0]["last_percent"][1] > 50
    assert {clock["source"] for clock in skew["clocks"]} == {"shared"}
    assert "mini-tp2" in said and (work / "out" / "results.tgz.part-0").is_file()
    assert not servers_of(work)
