"""profile and bench over ssh and an exec prefix: servers, probes and load there; what a lost connection leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmeter
from specmeter.trace.ring import read_ring
from tests.support.children import until
from tests.support.loopback_ssh import USABLE, WHY_NOT, Loopback, loopback_sshd
from tests.support.wiring_pairs import make

pytestmark = [pytest.mark.skipif(not USABLE, reason=WHY_NOT), pytest.mark.timeout(240)]
MINI = Path(__file__).resolve().parents[1] / "support" / "mini_sglang"
BARE = sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python"))
FAR_PYTHON = str(BARE[0]) if BARE else sys.executable
SLEEPER = "import time\ntime.sleep(100)"


class Far:
    """A host over loopback with a temporary folder and a place for links of its own."""

    def __init__(self, folder: Path, sshd: Loopback) -> None:
        self.folder, self.sshd, self.tmp = folder, sshd, folder / "tmp"
        self.here = folder / "here"
        self.standing: set[str] = set()

    def popen(self, *words: object, on: str = "ssh://far") -> subprocess.Popen[str]:
        """Start a command with ``--on``; its own temporary folder is ``here``."""
        command = [sys.executable, "-m", "specmeter", "--on", on, "--far-python", FAR_PYTHON, *map(str, words)]
        env = {**os.environ, "PATH": f"{self.sshd.bin}:{os.environ['PATH']}", "TMPDIR": str(self.here)}
        return subprocess.Popen(
            command, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, *words: object, code: int = 0, on: str = "ssh://far") -> subprocess.CompletedProcess[str]:
        """Run one to its end."""
        child = self.popen(*words, on=on)
        out, err = child.communicate(timeout=100)
        assert child.returncode == code, (child.returncode, out[-2000:], err[-3000:])
        return subprocess.CompletedProcess(child.args, code, out, err)

    def links(self) -> list[dict[str, Any]]:
        """The links there."""
        return list(json.loads(self.run("status", "--json").stdout)["result"]["links"])

    def left_behind(self) -> list[str]:
        """What a session may not leave, on both sides."""
        found = [path.name for folder in (self.tmp, self.here) for path in folder.glob("specmeter-[fm]*")]
        return sorted(set(found) - self.standing)


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp("sessions")
    for name in ("tmp", "here", "links"):
        (folder / name).mkdir(mode=0o700)
    shutil.copytree(MINI / "minisgl", folder / "lib" / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / "lib" / "minisgl-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: minisgl\nVersion: 1.2\n")
    env = {"TMPDIR": folder / "tmp", "XDG_RUNTIME_DIR": folder / "links", "PYTHONPATH": folder / "lib"}
    noise = 'ForceCommand echo Welcome; echo to-err >&2; eval "$SSH_ORIGINAL_COMMAND"'
    with loopback_sshd(folder / "ssh", noise, {name: str(value) for name, value in env.items()}) as sshd:
        yield Far(folder, sshd)


@pytest.fixture(autouse=True)
def _blamed_for_its_own_alone(far: Far) -> None:
    """What a failed test left behind is no failure of those after it."""
    far.standing |= set(far.left_behind())


@contextmanager
def mini_at(far: Far, on: str) -> Iterator[str]:
    """The miniature server behind HTTP, started there by ``run``, its link named mini; gives its address."""
    server = [sys.executable, "-u", str(MINI / "front.py")]
    words = ("run", "--recipe", MINI / "minisgl.toml", "--link", "mini", "--python", sys.executable, "--", *server)
    child = far.popen(*words, on=on)
    assert child.stdout is not None
    try:
        address = f"http://127.0.0.1:{int(child.stdout.readline())}"
        far.standing = set(far.left_behind())
        yield address
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=120)


@pytest.fixture(scope="module")
def mini(far: Far) -> Iterator[str]:
    with mini_at(far, "ssh://far") as address:
        yield address


@contextmanager
def asked(address: str) -> Iterator[None]:
    """Requests one after the other while inside."""
    ended = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(f"{address}/v1/chat/completions", b'{"max_tokens": 60}')
        while not ended.is_set():
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


def probes_in(far: Far) -> bool:
    return any(process["armed"] for link in far.links() for process in link["processes"] if process["alive"])


def test_profile_of_a_server_that_runs_there(far: Far, mini: str) -> None:
    words = ("profile", "--link", "mini", "--url", mini, "--engine", "sglang", "--baseline", "none", "--requests", "4")
    done = far.run(*words, "--max-tokens", "120", "--out", far.folder / "run", "--json")
    result = json.loads(done.stdout)["result"]
    # 4 requests of 20 pieces of 6 cycles each, but for the ends that are left out: where the machine is busy, those of
    # each piece, for the scheduler waits between them.
    assert 4 * 50 < result["cycle"]["count"] <= 4 * 120, result["cycle"]
    assert {"draft", "verify", "accept", "extend", "schedule"} <= {row["name"] for row in result["phases"]}
    run = specmeter.load(far.folder / "run")
    (there,) = run.run["on"]
    assert there["host"] == "ssh://far" and there["there"]["python"].startswith("3.") and there["lost_records"] == 0
    assert len(run.requests["send_ns"]) == 4 and (run.requests["first_ns"] > run.requests["send_ns"]).all()
    # Records and requests are on one clock, that of the host: each request holds cycles.
    starts = run.cycles["t0_ns"]
    for send, end in zip(run.requests["send_ns"], run.requests["end_ns"], strict=True):
        assert np.count_nonzero((starts >= send) & (starts <= end)) > 90
    assert not probes_in(far) and far.left_behind() == []
    _the_rings_here_hold_the_very_records_of_those_there(far)


def _the_rings_here_hold_the_very_records_of_those_there(far: Far) -> None:
    folder = far.folder / "run" / "rings"
    copies = {path.name: read_ring(path) for path in folder.glob("*.ring")}
    assert sum(len(copy.records) for copy in copies.values()) > 1000
    for path in (far.folder / "run", *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    for name, copy in copies.items():
        there = read_ring(far.folder / "links" / "specmeter" / "mini" / name).records[-len(copy.records) :]
        assert copy.holes == 0 and copy.overwritten == 0
        for column in ("t0", "t1", "cycle", "point", "kind", "lane", "value"):
            assert (copy.records[column] == there[column]).all(), column


def test_bench_over_ssh_closed_and_open_loop(far: Far, mini: str) -> None:
    words = ("bench", "--url", mini, "--engine", "sglang", "--requests", "6", "--max-tokens", "60", "--json")
    there = json.loads(far.run(*words, "--concurrency", "1,3").stdout)["result"]["levels"]
    assert [level["failed"] for level in there] == [0, 0] and there[0]["output_tokens"] == 6 * 60
    assert all(level["ttft_ms"]["n"] == 6 and level["ttft_ms"]["p50"] > 0 for level in there)
    open_loop = json.loads(far.run(*words, "--rate", "50").stdout)["result"]["levels"][0]
    assert open_loop["failed"] == 0 and open_loop["requests"] == 6
    missing = far.run("profile", "--url", "http://127.0.0.1:9", "--requests", "1", code=4)
    assert "onnection refused" in missing.stderr


def test_a_lost_connection_says_what_it_leaves_and_takes_the_probes_out(far: Far, mini: str) -> None:
    words = (
        "profile",
        "--link",
        "mini",
        "--url",
        mini,
        "--engine",
        "sglang",
        "--baseline",
        "none",
        "--requests",
        "500",
    )
    child = far.popen(*words, "--max-tokens", "4000", "--out", far.folder / "lost")
    try:
        until(lambda: probes_in(far), "the probes", 60)
        assert "controller" in str(far.links()[0]) and far.links()[0]["controller"] is not None
        clients = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        os.kill(int(clients[0]), signal.SIGKILL)
        _, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 4, err
    assert "The connection to ssh://far was lost" in err and "30 s after the last word" in err and "status" in err
    until(lambda: not probes_in(far), "the probes' end", 60)
    until(lambda: not far.left_behind(), "the folders' end")
    assert json.loads((far.folder / "lost" / "run.json").read_text())["status"] == "partial"


@pytest.mark.parametrize("how", ["connection", "controller", "interrupt"])
def test_a_server_that_was_started_there_ends_with_the_session(far: Far, mini: str, how: str) -> None:
    mark = f"sleeper-{how}"
    server = [sys.executable, "-c", SLEEPER, "sglang.launch_server", mark]
    child = far.popen("bench", "--engine", "sglang", "--", *server)

    def running() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in words and SLEEPER.encode() in words and b"specmeter" not in words:
                found.append(int(path.parent.name))
        return found

    try:
        until(running, "the server there", 60)
        if how == "connection":
            clients = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            os.kill(int(clients[0]), signal.SIGKILL)
        elif how == "controller":
            child.kill()
        else:
            child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=80)
    finally:
        child.kill()
    if how == "connection":
        assert child.returncode == 4 and "was lost" in err and "is ended by the far side" in err, err
    if how == "interrupt":
        assert child.returncode == 130, err
    until(lambda: not running(), "the end of the server there", 60)
    until(lambda: not [name for name in far.left_behind() if "far" in name], "the end of the folder there", 60)


def test_two_hosts_are_joined_on_one_clock(far: Far, mini: str) -> None:
    links = far.folder / "other"
    links.mkdir(mode=0o700)
    other = f"ssh far env XDG_RUNTIME_DIR={links}"
    words = ("profile", "--on", other, "--link", "mini", "--url", mini, "--engine", "sglang", "--baseline", "none")
    with mini_at(far, other) as address, asked(address):
        done = far.run(*words, "--requests", "2", "--max-tokens", "240", "--out", far.folder / "joined", "--json")
        far.standing = set(far.left_behind())
    warnings = json.loads(done.stdout)["warnings"]
    assert any("on the clock of ssh://far, off by at most" in text for text in warnings), warnings
    run = specmeter.load(far.folder / "joined")
    first, second = run.run["on"]
    clock = second["clock"]
    # Both are this machine in truth, so what was added is the error itself.
    assert abs(clock["added_ns"]) <= clock["error_ns"] < 1e9, clock
    assert clock["onto"] == "ssh://far" and "clock" not in first
    pids = {path.stem.split("-")[-2] for path in (run.path / "rings").glob("*.ring")}
    assert len(pids) == 2 and len(set(run.spans["pid"])) == 2
    begun = [run.spans["t0_ns"][run.spans["pid"] == pid] for pid in sorted(set(run.spans["pid"]))]
    assert max(times.min() for times in begun) < min(times.max() for times in begun), "they ran at the same time"
    done = far.run(
        *words[:1], "--on", other, "--requests", "1", "--", sys.executable, "-m", "specmeter", "serve", code=2
    )
    assert "cannot be started on 2 hosts" in done.stderr and "--link NAME" in done.stderr
    assert "at work on one host" in far.run("bench", "--on", other, "--url", mini, code=2).stderr


def test_top_shows_a_server_that_runs_there(far: Far, mini: str) -> None:
    far.run("arm", "--link", "mini")
    try:
        with asked(mini):
            done = far.run("top", "--link", "mini", "--seconds", "3", "--json")
    finally:
        far.run("disarm", "--link", "mini")
    (server,) = json.loads(done.stdout)["result"]["servers"]
    assert server["link"] == "mini" and server["armed"] and server["fault"] is None
    assert sum(rank["cycles"] for rank in server["ranks"]) > 0, server["ranks"]
    assert "There is no link nothing there" in far.run("top", "--link", "nothing", "--once", code=2).stderr
    assert far.left_behind() == []


def test_check_answers_there_as_here(far: Far, tmp_path: Path) -> None:
    target, head = make("llama").write(tmp_path)
    words = ("check", "--target", target, "--draft", head)
    there = far.run(*words, "--engine", "sglang==0.5.16")
    command = [sys.executable, "-m", "specmeter", *map(str, words), "--engine", "sglang==0.5.16"]
    here = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # There the headline is not broken into lines.
    assert there.returncode == here.returncode == 0 and there.stdout.split() == here.stdout.split()
    assert "feeds" in here.stdout
    assert "is not done on another host" in far.run(*words, "--probe", code=5).stderr


def test_there_is_no_default_server_on_another_host(far: Far, mini: str) -> None:
    done = far.run("profile", "--requests", "1", code=2)
    assert "No server is named for ssh://far" in done.stderr and "-- CMD" in done.stderr
    done = far.run("profile", "--link", "nothing", "--url", "http://127.0.0.1:9", code=2)
    assert "There is no link nothing" in done.stderr
    assert far.left_behind() == []


@pytest.mark.engine
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_profile_of_a_server_started_in_another_namespace(far: Far, mini: str) -> None:
    prefix = "unshare --mount --pid --fork --mount-proc --uts"
    if subprocess.run([*prefix.split(), "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed here")
    server = [sys.executable, "-m", "specmeter", "serve", "--threads", "1"]
    words = (
        "profile",
        "--requests",
        "2",
        "--max-tokens",
        "24",
        "--out",
        far.folder / "inside",
        "--json",
        "--",
        *server,
    )
    result = json.loads(far.run(*words, on=prefix).stdout)["result"]
    assert result["cycle"]["count"] > 10 and result["baseline"]["step_ms"]["point"] > 1
    log = far.folder / "inside" / "logs" / "server.log"
    assert log.stat().st_size > 0 and stat.S_IMODE(log.stat().st_mode) == 0o600
    counted = result["engine_counters"]["cycles"]
    # The engine counts every cycle; the probes see all but those cut off at the ends of the recording.
    assert 0 <= counted - np.count_nonzero(specmeter.load(far.folder / "inside").cycles["drafted"] > 0) <= 2
    assert far.left_behind() == []
