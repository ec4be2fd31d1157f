"""``specmeter explain --live`` on a running embedded engine: no restart, probes out again, three actions at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import specmeter
from specmeter.cli import main

pytest.importorskip("torch")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server that `specmeter run --link live` started."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = [sys.executable, "-m", "specmeter", "run", "--link", "live", "--"]
    serve = [
        sys.executable,
        "-m",
        "specmeter",
        "serve",
        "--port",
        str(port),
        "--speculative-num-steps",
        "3",
        "--threads",
        "1",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*run, *serve], stdout=log, stderr=log, env={**os.environ}, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        yield url
        assert process.poll() is None, "the server must still run"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if httpx.get(f"{url}/health", timeout=20).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise AssertionError("not healthy")


def test_a_running_server_is_explained_without_a_restart(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["explain", "--live", "--link", "live", "--url", server, "--seconds", "5", "--requests", "3"]
    assert main([*words, "--max-tokens", "24", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["now_steps"] == 3
    assert {row["steps"] for row in result["curve"] if row["status"] == "measured"} == {2, 3, 6}
    assert len(result["actions"]) == 3, [action["title"] for action in result["actions"]]
    for action in result["actions"]:
        assert action["command"].startswith("specmeter ")
        assert action["gain"]["low"] <= action["gain"]["point"] <= action["gain"]["high"]
    assert result["baseline_step_ms"] is not None
    # The run is there to be explained again, and to be a gate's saved run.
    assert main(["explain", str(out)]) == 0
    assert main(["gate", str(out), "--against", str(out)]) == 0
    states = [json.loads(p.read_text()) for p in (tmp_path / "specmeter" / "live").glob("[0-9]*-*.json")]
    assert states and not any(state["armed"] for state in states)
    run = specmeter.load(out)
    served = httpx.get(f"{server}/v1/models").json()["data"][0]["id"]
    assert run.analysis["setting"] == "server" and run.run["model"] == served
    # Trees follow from the draft's ranks, which the engine tells where a chain failed.
    decode = run.cycles["kind"] == "decode"
    failed = decode & (run.cycles["drafted"] > 0) & (run.cycles["accepted"] < run.cycles["drafted"])
    told = run.cycles["missed_rank"] >= 0
    assert failed.sum() > 20 and (told == failed)[decode].mean() > 0.98
    assert (run.cycles["missed_rank"][told] != 1).all() and (run.cycles["missed_rank"][told] == 2).mean() > 0.1
    assert not result["trees"]["reason"] and result["trees"]["rows"]
