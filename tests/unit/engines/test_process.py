"""The server's process and everything it starts end with it, and with us, however we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specmeter.engines.process import ServerProcess, free_port, port_is_taken
from specmeter.errors import SpecmeterError

# A "server" with a worker in a session of its own and an orphan whose parent has ended; both ignore TERM.
FAMILY = """
import os, signal, subprocess, sys, time
from pathlib import Path
out = Path(sys.argv[1])
nap = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True, stdout=subprocess.PIPE)
make_orphan = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE);"
    " p.stdout.readline(); print(p.pid)"
)
orphan = int(subprocess.run([sys.executable, "-c", make_orphan, nap], stdout=subprocess.PIPE, text=True).stdout)
worker.stdout.readline()
(out / "tmp").write_text(f"{os.getpid()} {worker.pid} {orphan}")
(out / "tmp").rename(out / "pids")
time.sleep(600)
"""


def _wait(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _family(tmp_path: Path) -> list[int]:
    assert _wait((tmp_path / "pids").exists), "the family did not start"
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


def test_stop_ends_workers_sessions_and_orphans(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", FAMILY, str(tmp_path)], os.environ, tmp_path / "log")
    pids = _family(tmp_path)
    assert all(_alive(pid) for pid in pids)
    process.stop(grace_s=0.3)
    assert [pid for pid in pids if _alive(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_we_are_killed(tmp_path: Path, number: int) -> None:
    caller = (
        "import os, sys, time; from pathlib import Path; from specmeter.engines.process import ServerProcess\n"
        "p = ServerProcess([sys.executable, '-c', sys.argv[2], sys.argv[1]], os.environ, Path(sys.argv[1]) / 'log')\n"
        "time.sleep(600)"
    )
    us = subprocess.Popen([sys.executable, "-c", caller, str(tmp_path), FAMILY])
    pids = _family(tmp_path)
    us.send_signal(number)
    us.wait()
    assert _wait(lambda: not any(_alive(pid) for pid in pids)), pids


def test_server_dies_with_a_killed_guardian(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path / "log")
    process._guardian.kill()
    assert _wait(lambda: not _alive(process.pid))
    assert process.poll() == -signal.SIGKILL


def test_own_death_is_noticed_with_its_code_and_cause(tmp_path: Path) -> None:
    script = "import sys; print('loading'); raise OSError(98, 'Address already in use')"
    process = ServerProcess([sys.executable, "-c", script], os.environ, tmp_path / "log")
    assert _wait(lambda: process.poll() is not None)
    assert process.poll() == 1
    error = process.failure("The server ended.")
    assert "the port is taken" in error.why and "exit code 1" in error.why and "loading" in error.why
    assert error.exit == 4
    process.stop()


def test_workers_of_a_dead_server_are_ended(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", FAMILY, str(tmp_path)], os.environ, tmp_path / "log")
    pids = _family(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    assert _wait(lambda: process.poll() is not None)
    assert process.poll() == -signal.SIGKILL
    assert _wait(lambda: not any(_alive(pid) for pid in pids))
    process.stop()


def test_second_interrupt_while_stopping_kills_at_once(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", FAMILY, str(tmp_path)], os.environ, tmp_path / "log")
    pids = _family(tmp_path)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        process.stop(grace_s=60.0)
    assert time.monotonic() - began < 40.0
    assert not any(_alive(pid) for pid in pids)


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match="not found"):
        ServerProcess(["no-such-server-command"], os.environ, tmp_path / "log")


def test_command_that_cannot_be_executed(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(SpecmeterError, match="could not be started"):
        ServerProcess([str(broken)], os.environ, tmp_path / "log")


def test_log_is_private(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", "print('hello')"], os.environ, tmp_path / "logs" / "server.log")
    assert _wait(lambda: process.poll() is not None)
    process.stop()
    assert (tmp_path / "logs" / "server.log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "logs" / "server.log").read_text() == "hello\n"


def test_free_port_is_free_until_taken() -> None:
    import socket

    port = free_port()
    assert not port_is_taken(port)
    with socket.socket() as held:
        held.bind(("127.0.0.1", port))
        held.listen()
        assert port_is_taken(port)
