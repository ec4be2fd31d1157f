"""``specmeter demo`` from its command to its saved directory, with few and short requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specmeter.trace.rundir import load

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


def test_demo_ends_with_the_best_setting_its_proof_and_a_saved_directory(tmp_path: Path) -> None:
    words = ["demo", "--requests", "1", "--max-tokens", "10", "--threads", "1", "--out", "run", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "specmeter", *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    profile, swept = document["result"]["profile"], document["result"]["sweep"]
    assert document["schema"] == "specmeter/demo/1" and document["warnings"] == []
    assert profile["kind"] == "profile" and profile["setting"] == "k=3" and profile["cycle"]["count"] > 2
    rows = {row["setting"]: row for row in swept["arms"]}
    assert {"baseline", *(f"k={k}" for k in range(1, 7))} < set(rows) and len(rows) == 8
    # The best setting is the fastest of all, and the proof is a ratio to plain decoding with both its ends.
    speeds = {name: row["tokens_per_s"]["point"] for name, row in rows.items()}
    assert swept["best"] == max(speeds, key=lambda name: speeds[name]) and swept["verdict"]["sentence"]
    for name, row in rows.items():
        if name != "baseline":
            assert 0 < row["ratio"]["low"] < row["ratio"]["point"] < row["ratio"]["high"] and row["ratio"]["n"] == 2
            assert row["verdict"] in ("faster", "slower", "inconclusive") and row["break_even_tokens"] > 0
    if swept["best"] != "baseline":
        assert swept["best"] in swept["verdict"]["sentence"]
    assert swept["same_output"]["compared"] == 7
    saved = load(tmp_path / "run")
    assert saved.run["status"] == "complete" and saved.analysis == swept and document["run_dir"] == "run"
    assert saved.children["profile"].analysis == profile and saved.children["profile"].run["status"] == "complete"
    assert swept["verdict"]["sentence"][:30] in saved.report and (tmp_path / "run/report.html").stat().st_size > 10_000
