"""profile, sweep and bench on the real embedded engine, and what can go wrong on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specmeter
from specmeter.control import find_link, remove_link
from specmeter.engines.guardian import descendants
from specmeter.engines.process import free_port
from specmeter.trace.rundir import load
from tests.support.changed_heads import changed_head
from tests.support.descendants import LinkFolder, alive, servers_below, wait

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
BASE = [sys.executable, "-m", "specmeter"]
SERVE = [*BASE, "serve", "--threads", "1"]


def _run(*words: str, cwd: Path, code: int = 0, **extra: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*BASE, *words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **extra)
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-3000:])
    return done


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict]]:
    """One profile of three prompts."""
    folder = tmp_path_factory.mktemp("profile")
    words = ["profile", "--steps", "2", "--requests", "3", "--max-tokens", "40", "--threads", "1", "--json"]
    done = _run(*words, "--out", "run", cwd=folder)
    yield folder / "run", json.loads(done.stdout)


def test_profile_measures_cycle_baseline_and_acceptance(profiled: tuple[Path, dict]) -> None:
    _, document = profiled
    result = document["result"]
    assert document["schema"] == "specmeter/profile/1" and result["kind"] == "profile"
    assert result["cycle"]["count"] > 20 and result["cycle"]["mean_ms"]["point"] > 1
    assert {"draft", "verify", "accept", "extend", "kv"} <= {row["name"] for row in result["phases"]}
    assert result["baseline"]["step_ms"]["point"] > 1 and result["break_even_tokens"]["point"] > 0.5
    assert result["coverage"]["leaf_percent"] >= 98
    assert 1 < result["acceptance"]["length_tokens"]["point"] <= 3


def test_probes_and_the_engines_own_counters_agree(profiled: tuple[Path, dict]) -> None:
    path, document = profiled
    counted = document["result"]["engine_counters"]
    cycles = specmeter.load(path).cycles
    ours = cycles["drafted"] > 0
    # The engine counts every cycle; the probes see all but those cut off at the ends of the recording.
    assert 0 <= counted["cycles"] - int(ours.sum()) <= 2
    seen = int(cycles["accepted"][ours].sum())
    assert abs(counted["accepted_tokens"] - seen) <= 4 and seen > 0


def test_run_directory_is_whole_private_and_prints_again(profiled: tuple[Path, dict]) -> None:
    path, document = profiled
    saved = load(path)
    assert saved.run["status"] == "complete" and saved.analysis == document["result"]
    assert path.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.rglob("*"))
    assert "Break-even" in _run("report", str(path), cwd=path.parent).stdout


def test_sweep_gives_every_setting_an_interval(tmp_path: Path) -> None:
    words = ["sweep", "--steps", "1,2", "--requests", "2", "--blocks", "1", "--max-tokens", "24", "--threads", "1"]
    document = json.loads(_run(*words, "--json", "--out", "run", cwd=tmp_path).stdout)
    rows = {row["setting"]: row for row in document["result"]["arms"]}
    assert set(rows) == {"baseline", "k=1", "k=2"}
    assert rows["k=1"]["ratio"]["low"] <= rows["k=1"]["ratio"]["point"] <= rows["k=1"]["ratio"]["high"]
    assert rows["k=2"]["accept_length_tokens"]["point"] > 1
    assert load(tmp_path / "run").run["status"] == "complete"


def test_bench_against_a_command(tmp_path: Path) -> None:
    words = ["bench", "--requests", "3", "--max-tokens", "16", "--concurrency", "1,2", "--json", "--out", "run"]
    document = json.loads(_run(*words, "--", *SERVE, cwd=tmp_path).stdout)
    one, two = document["result"]["levels"]
    assert one["output_tokens"] == two["output_tokens"] == 48 and one["failed"] == 0
    assert one["accept_length_tokens"] > 1 and one["ttft_ms"]["p50"] > 0
    again = _run("report", "run", cwd=tmp_path).stdout
    assert again.startswith(document["result"]["verdict"]["sentence"][:30]) and "2 requests at once:" in again


def test_running_server_is_armed_disarmed_and_left_running(tmp_path: Path) -> None:
    port, link = free_port(), f"test-{os.getpid()}"
    server = subprocess.Popen([*BASE, "run", "--link", link, "--", *SERVE, "--port", str(port)], cwd=tmp_path)
    try:
        url = f"http://127.0.0.1:{port}"
        import httpx

        def healthy() -> bool:
            try:
                return httpx.get(f"{url}/health", trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        assert wait(healthy)
        words = ["profile", "--url", url, "--link", link, "--requests", "2", "--max-tokens", "24", "--json", "--out"]
        document = json.loads(_run(*words, "run", "--deep", "5", cwd=tmp_path).stdout)
        assert document["result"]["cycle"]["count"] > 5 and document["result"]["baseline"]["step_ms"]
        deep = {window["setting"]: window for window in document["result"]["deep"]}
        assert len(deep) == 2 and {window["cycles"] for window in deep.values()} == {5} and document["warnings"] == []
        assert all(any(row["phase"] == "verify" for row in window["top"]) for window in deep.values())
        width = document["result"]["verify_width"]
        # The window's own requests tell the context; prompts of some tens of tokens and answers of 24.
        assert all(10 < width["context_tokens"][side] < 400 for side in ("verify", "plain")), width["context_tokens"]
        again = json.loads(_run("report", "run", "--json", cwd=tmp_path).stdout)
        assert again["result"]["verify_width"]["context_tokens"] == width["context_tokens"]
        assert (
            "ran under torch's profiler (operators on the host), and only those"
            in (tmp_path / "run/report.txt").read_text()
        )
        assert len(list((tmp_path / "run/deep").glob("*.json.gz"))) == 2
        state = json.loads(_run("status", "--link", link, "--json", cwd=tmp_path).stdout)
        assert '"armed": true' not in json.dumps(state).lower() and healthy()
        wrong = _run("profile", "--url", url, "--link", link, "--model-name", "nobody", cwd=tmp_path, code=2)
        assert "does not serve a model named nobody" in wrong.stderr
        bare = _run("profile", "--url", url, "--out", "bare", cwd=tmp_path, code=3)
        assert "carries no probes" in bare.stderr and not (tmp_path / "bare").exists()
        swept = [
            "sweep",
            "--url",
            url,
            "--steps",
            "1",
            "--requests",
            "1",
            "--blocks",
            "1",
            "--max-tokens",
            "8",
            "--json",
        ]
        rows = json.loads(_run(*swept, "--out", "swept", cwd=tmp_path).stdout)["result"]["arms"]
        assert [row["setting"] for row in rows] == ["baseline", "k=1"]
    finally:
        server.terminate()
        server.wait(60)
        remove_link(find_link(link))


@pytest.mark.parametrize("moment", ["before health", "during load"])
def test_interrupt_leaves_nothing(tmp_path: Path, moment: str) -> None:
    words = [*BASE, "profile", "--requests", "40", "--max-tokens", "200", "--out", "run", "--", *SERVE]
    folder = LinkFolder(tmp_path / "runtime")
    ours = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=folder.env)
    if moment == "before health":
        assert wait((tmp_path / "run/logs/server.log").exists)
    else:
        assert wait(folder.recording)
    started = descendants(ours.pid)
    assert started
    ours.send_signal(signal.SIGINT)
    assert ours.wait(60) == 130
    assert wait(lambda: not any(map(alive, started)), 30), started
    assert folder.links() == []
    assert "interrupted" in (ours.stderr.read() if ours.stderr else "")
    assert load(tmp_path / "run").run["status"] == "partial"


def test_killed_server_is_told_with_exit_4(tmp_path: Path) -> None:
    words = [*BASE, "profile", "--requests", "40", "--max-tokens", "200", "--out", "run", "--", *SERVE]
    folder = LinkFolder(tmp_path / "runtime")
    ours = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=folder.env)
    assert wait((tmp_path / "run/plan.json").exists)

    servers: list[int] = []
    assert wait(lambda: folder.recording() and (servers.extend(servers_below(ours.pid)) or servers))
    started = descendants(ours.pid)
    os.kill(servers[0], signal.SIGKILL)
    assert ours.wait(60) == 4
    said = ours.stderr.read() if ours.stderr else ""
    assert "ended" in said and "SIGKILL" in said and "server.log" in said
    assert wait(lambda: not any(map(alive, started)), 30) and folder.links() == []
    assert load(tmp_path / "run").run["status"] == "partial"


def test_port_taken(tmp_path: Path) -> None:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        done = _run("bench", "--out", "run", "--", *SERVE, "--port", port, cwd=tmp_path, code=4)
    assert f"Port {port} is taken" in done.stderr


def test_server_that_dies_at_once_and_one_that_is_never_healthy(tmp_path: Path) -> None:
    broken = _run("bench", "--out", "a", "--", *SERVE, "--draft", "/no/such/head", cwd=tmp_path, code=4)
    assert "ended before it was ready" in broken.stderr and "log (last lines)" in broken.stderr
    deaf = [sys.executable, "-c", "import time; time.sleep(600)"]
    words = ["bench", "--engine", "embedded", "--start-timeout", "1", "--out", "b", "--", *deaf]
    assert "not healthy after 1 s" in _run(*words, cwd=tmp_path, code=4).stderr


def test_a_head_that_does_not_fit_is_told_with_the_servers_words(tmp_path: Path) -> None:
    words = [
        "profile",
        "--steps",
        "2",
        "--threads",
        "1",
        "--out",
        "run",
        "--draft",
        str(changed_head(tmp_path / "head")),
    ]
    done = _run(*words, cwd=tmp_path, code=4)
    assert "ended before it was ready" in done.stderr and "hidden size is 64" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "-1"], "steps is -1"),
        (["--steps", "2", "--draft-tokens", "9"], "must lie in 3..3"),
        (["--steps", "2", "--topk", "4", "--draft-tokens", "1"], "must lie in 2..21"),
        (["--steps", "0"], "plain decoding"),
        (["--topk", "2"], "need --steps"),
        (["--requests", "0"], "--requests is 0"),
        (["--prompts", "empty.jsonl"], "is empty"),
        (["--prompts", "broken.jsonl"], "line 2"),
        (["--baseline", "nowhere"], "is no run directory"),
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('"fine"\n{"prompt"\n')
    done = _run("profile", *words, "--out", "run", cwd=tmp_path, code=2)
    assert said in done.stderr and not (tmp_path / "run").exists()


def test_missing_anchor_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'schema = 1\nengine = "specmeter"\nabout = "x"\n[[versions]]\ndist = ["specmeter"]\nrange = ">=0.1.0"\n'
        '[[point]]\nname = "cycle"\nrole = "cycle"\nkind = "body"\nclock = "host"\nrequired = true\nabout = "x"\n'
        'anchors = [{ module = "specmeter.eagle.worker", function = "Worker.no_such" }]\n'
    )
    done = _run("profile", "--recipe", "my.toml", "--out", "run", "--", *SERVE, cwd=tmp_path, code=1)
    assert "no_such" in done.stderr or "cycle" in done.stderr
    assert not (tmp_path / "run").exists()
