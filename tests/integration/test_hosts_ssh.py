"""``--on`` over a real sshd on loopback with keys, and over exec prefixes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specmeter import cli
from tests.integration.test_patch import RECIPE, WORKER
from tests.support.children import until
from tests.support.recipes import install

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh-keygen") is None or os.geteuid() != 0,
    reason="needs sshd (apt-get install openssh-server) and root, to start one of its own",
)
LOOP = """
import sys, time
sys.path.insert(0, sys.argv[1])
from fork.worker import Worker
while True:
    Worker().cycle(1)
    time.sleep(0.01)
"""


@dataclass
class Far:
    """An sshd with its own keys; ``ssh`` on PATH uses the configuration of this folder."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return "ssh://far"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp("far")
    folder.chmod(0o700)
    (folder / "tmp").mkdir()
    for name in ("host", "key", "wrong"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    (folder / "banner").write_text("Authorized use only.\n\0specmeter deadbeef start\n")
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    # The noise is what a talkative .bashrc prints before the command.
    (folder / "sshd").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPidFile none\n"
        f"PermitRootLogin yes\nBanner {folder}/banner\nSetEnv TMPDIR={folder}/tmp XDG_STATE_HOME={folder}/state\n"
        'ForceCommand echo Welcome, it is $(date); echo to-err >&2; eval "$SSH_ORIGINAL_COMMAND"\n'
    )
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    common = f"  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentitiesOnly yes\n  IdentityAgent none\n"
    (folder / "config").write_text(
        f"Host far\n{common}  IdentityFile {folder}/key\n  UserKnownHostsFile {folder}/known\n"
        f"Host jumped\n{common}  IdentityFile {folder}/key\n  UserKnownHostsFile {folder}/known\n  ProxyCommand "
        f"/usr/bin/ssh -F {folder}/config -W %h:%p far\n"
        f"Host wrong\n{common}  IdentityFile {folder}/wrong\n  UserKnownHostsFile {folder}/known\n"
        f"Host unknown\n{common}  IdentityFile {folder}/key\n  UserKnownHostsFile {folder}/nothing\n"
        f"Host closed\n  HostName 127.0.0.1\n  Port 1\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "sshd")], stderr=subprocess.DEVNULL)
    until(lambda: connects(port), "sshd")
    yield Far(folder, port, process)
    process.terminate()
    process.wait()


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def path(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{far.folder}/bin:{os.environ['PATH']}")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    install(tmp_path / "lib", "fork", {"worker": WORKER})
    (tmp_path / "my.toml").write_text(RECIPE)
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def specmeter(*words: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specmeter", "--far-python", python, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def answer(*words: object, python: str = sys.executable) -> dict[str, Any]:
    done = specmeter(*words, "--json", python=python)
    assert done.returncode == 0, done.stderr + done.stdout
    return dict(json.loads(done.stdout)["result"])


def left_behind(far: Far) -> list[Path]:
    return list((far.folder / "tmp").glob("specmeter-far-*"))


PYENV = [
    sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")) for version in ("3.9", "3.10", "3.12", "3.13")
]
PYTHONS = [sys.executable, *(str(path) for paths in PYENV for path in paths)]


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parent.parent.name)
def test_source_on_every_python(far: Far, python: str) -> None:
    done = specmeter("--on", far.url, "source", "json", "--json", python=python)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("{"), "banner and login noise are no part of the answer"
    assert str(Path(python).resolve().parents[1]) in json.loads(done.stdout)["result"]["path"]
    assert left_behind(far) == []


def test_the_same_answer_here_and_there(far: Far, engine: Path) -> None:
    words = ("plan", "--path", engine / "lib", "--recipe", engine / "my.toml")
    assert answer("--on", far.url, *words) == answer(*words)
    assert answer(*words, "--on=ssh://jumped") == answer(*words)
    assert answer(*words, "--on", "env -u NOTHING") == answer(*words)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_another_namespace_as_a_container(far: Far, tmp_path: Path) -> None:
    prefix = "unshare --mount --pid --fork --mount-proc --uts"
    if subprocess.run([*prefix.split(), "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed here")
    assert answer("--on", prefix, "source", "json")["path"].endswith("json/__init__.py")


def run_over_ssh(engine: Path, *options: str) -> subprocess.Popen[str]:
    """Start the engine's loop over there, under ``specmeter run``."""
    on = ["--on", f"ssh far env PYTHONPATH={engine / 'lib'}", "--far-python", sys.executable]
    server = [sys.executable, str(engine / "loop.py"), str(engine / "lib")]
    words = ["run", "--recipe", str(engine / "my.toml"), *options, "--", *server]
    command = [sys.executable, "-m", "specmeter", *on, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_run_arm_status_disarm_over_ssh(far: Far, engine: Path) -> None:
    child = run_over_ssh(engine, "--link", "overssh")
    try:

        def described() -> Any:
            found = answer("--on", far.url, "status")["links"]
            return found and found[0]["processes"] and found[0]

        link = until(described, "the far server", 60)
        assert link["link"] == "overssh" and not link["armed"]
        armed = answer("--on", far.url, "arm", "--link", "overssh")
        assert [point["armed"] for point in armed["processes"][0]["points"]] == [True, True]
        until(lambda: all(point["hits"] for point in described()["processes"][0]["points"]), "hits")
        assert described()["armed_by"]["address"] == "127.0.0.1", "who armed came in over ssh"
        disarmed = answer("--on", far.url, "disarm", "--link", "overssh")
        assert not any(point["armed"] for point in disarmed["processes"][0]["points"])
        pid = link["processes"][0]["pid"]
    finally:
        child.send_signal(signal.SIGINT)
        err = child.communicate(timeout=60)[1]
    assert child.returncode == 130, err
    until(lambda: not Path(f"/proc/{pid}").exists(), "the far server's end")
    until(lambda: not left_behind(far), "the far folder's end")
    assert specmeter("--on", far.url, "detach", "--link", "overssh").returncode == 0
    assert answer("--on", far.url, "status")["links"] == []


@pytest.mark.parametrize("how", ["connection", "controller"])
def test_a_lost_connection_ends_the_far_server_and_says_so(far: Far, engine: Path, how: str) -> None:
    child = run_over_ssh(engine)

    def found() -> Any:
        links = answer("--on", far.url, "status")["links"]
        return [process["pid"] for link in links for process in link["processes"] if process["alive"]]

    try:
        (pid,) = until(found, "the far server", 60)
        if how == "connection":
            clients = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            os.kill(int(clients[0]), signal.SIGKILL)
            assert child.wait(60) == 4
            _, err = child.communicate()
            assert "The connection to" in err and "was lost" in err and "status" in err
        else:
            child.kill()
    finally:
        child.kill()
        child.communicate()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the far server's end")
    until(lambda: not left_behind(far), "the far folder's end")
    until(lambda: answer("--on", far.url, "status")["links"] == [], "the link's end")


@pytest.mark.parametrize(
    "url, why, step",
    [
        ("ssh://wrong", "Permission denied", "never asks for a password"),
        ("ssh://unknown", "Host key verification failed", "log in once"),
        ("ssh://closed", "onnection refused", "port"),
        ("ssh://nowhere.invalid", "resolve", "~/.ssh/config"),
    ],
)
def test_hosts_that_cannot_be_reached(far: Far, url: str, why: str, step: str) -> None:
    before = time.monotonic()
    done = specmeter("--on", url, "status")
    assert done.returncode == 5 and why in done.stderr and step in done.stderr, done.stderr
    assert time.monotonic() - before < 50, "it must never wait for an answer"


def test_no_python_and_one_that_is_too_old(far: Far) -> None:
    done = specmeter("--on", far.url, "status", python="python-of-nowhere")
    assert done.returncode == 5 and "There is no python-of-nowhere" in done.stderr and "--far-python" in done.stderr
    for old in sorted(Path.home().glob(".pyenv/versions/3.[678].*/bin/python")):
        done = specmeter("--on", far.url, "status", python=str(old))
        assert done.returncode == 5 and "at least 3.9 is needed" in done.stderr
    assert left_behind(far) == []


NASTY = [
    "$(touch INJECTED)",
    "`touch INJECTED`",
    "; touch INJECTED #",
    "a'b\"c",
    "new\nline; touch INJECTED",
    "-oProxyCommand=touch INJECTED",
    "ü ø",
]


@pytest.mark.parametrize("text", NASTY)
def test_no_word_reaches_a_shell(far: Far, tmp_path: Path, text: str) -> None:
    text = text.replace("INJECTED", str(tmp_path / "injected"))
    there = specmeter("--on", far.url, "source", "--", text)
    here = specmeter("source", "--", text)
    assert (there.returncode, there.stderr) == (here.returncode, f"{here.stderr}  on:   {far.url}\n"), "the very word"
    specmeter("--on", far.url, "status", python=text)
    specmeter("--on", f"ssh://{text}", "status")
    specmeter("--on", f"ssh://{text}@far", "status")
    assert not (tmp_path / "injected").exists()
    assert left_behind(far) == []


@pytest.mark.parametrize(
    "text", ["ssh://-oProxyCommand=x", "ssh://-l@far", "ssh://a b", "ssh://far/path", "ssh://", "ssh:far"]
)
def test_addresses_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--on", text, "status"]) == 2
    assert "no SSH address" in capsys.readouterr().err


def test_commands_that_do_not_run_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--on", "env", "train"]) == 2
    assert "does not run on another host yet" in capsys.readouterr().err


def test_attach_and_patch_over_ssh(far: Far, engine: Path) -> None:
    on = f"ssh far env PYTHONPATH={engine / 'lib'}"
    target = engine / "lib" / "fork" / "__init__.py"
    result = answer("--on", on, "patch", "apply", "--recipe", engine / "my.toml", "--python", sys.executable)
    assert list(result["files"].values()) == ["applied"] and "specmeter patch" in target.read_text()
    assert specmeter("--on", on, "patch", "status").returncode == 1
    assert answer("--on", on, "patch", "restore")["files"] == {str(target): "restored"}
    assert target.read_text() == "" and left_behind(far) == []
