"""``top`` through a real sshd, on a terminal with colours and on one without."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.growing import GrowingRing
from tests.support.saved_runs import MS, PLAN, recording

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[list[str]]:
    """The words that begin an ssh command to an sshd of this test's own."""
    daemon = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if daemon is None or shutil.which("ssh") is None:
        pytest.skip("no sshd here (Debian: openssh-server)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    options = {
        "ListenAddress": "127.0.0.1", "Port": port, "HostKey": tmp_path / "host", "PidFile": tmp_path / "pid",
        "AuthorizedKeysFile": tmp_path / "authorized", "StrictModes": "no", "UsePAM": "no",
        "PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password",
    }  # fmt: skip
    (tmp_path / "sshd").write_text("\n".join(f"{key} {value}" for key, value in options.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    server = subprocess.Popen([daemon, "-D", "-e", "-f", str(tmp_path / "sshd")], stderr=subprocess.DEVNULL)
    try:
        yield [
            "ssh", "-tt", "-p", str(port), "-i", str(tmp_path / "user"), "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "ConnectionAttempts=20", "127.0.0.1",
        ]  # fmt: skip
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("term", ["xterm-256color", "vt100"])
def test_top_through_ssh(ssh: list[str], tmp_path: Path, term: str) -> None:
    ring = GrowingRing(tmp_path / "specmeter", PLAN, "far")
    remote = f"env TERM={term} XDG_RUNTIME_DIR={tmp_path} {sys.executable} -m specmeter top"
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(ssh[0], [*ssh, remote])
    said, end, step = b"", time.monotonic() + 100, 0
    try:
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    said += os.read(terminal, 65536)
                except OSError:
                    break
            if step == 0 and b"no cycle yet" in said:
                length = 4 * (30 * 27 + 102) * MS
                ring.add(recording(start=time.perf_counter_ns() - length)[0])
                step = 1
            if step == 1 and b"break-even" in said:
                os.write(terminal, b"q")
                step = 2
    finally:
        if step != 2:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(terminal)
    assert step == 2, said[-2000:]
    assert os.waitstatus_to_exitcode(status) == 0
