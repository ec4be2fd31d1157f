"""``--on`` through jump hosts, a slow link, other roots and namespaces, and to every CPython; what must be refused."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_patch import RECIPE, WORKER
from tests.support.children import until
from tests.support.loopback_ssh import USABLE, WHY_NOT, Loopback, free_port, loopback_sshd
from tests.support.recipes import install

pytestmark = [pytest.mark.skipif(not USABLE, reason=WHY_NOT), pytest.mark.timeout(240)]
LOOP = """
import time
from fork.worker import Worker
print("ready", flush=True)
while True:
    Worker().cycle(1)
    time.sleep(0.01)
"""
HOSTILE = 'it\'s $(touch INJECTED) `touch INJECTED`; "a\nb" &|<>*?[x] -n'


class Host:
    """An sshd on two ports, and the folder that its sessions use for temporary files and links."""

    def __init__(self, folder: Path, sshd: Loopback, hop: int) -> None:
        self.folder, self.sshd, self.tmp = folder, sshd, folder / "tmp"
        sshd.add_host("hop", hop)
        sshd.add_host("behind", ProxyJump="hop")
        sshd.add_host("up", ControlMaster="auto", ControlPath=str(folder / "control"), ControlPersist="60")

    def start(self, *words: object, on: str = "ssh://up", python: str = sys.executable) -> subprocess.Popen[str]:
        """Start a command there."""
        command = [sys.executable, "-m", "specmeter", "--on", on, "--far-python", python, *map(str, words)]
        env = {**os.environ, "PATH": f"{self.sshd.bin}:{os.environ['PATH']}"}
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def call(
        self, *words: object, on: str = "ssh://up", python: str = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        """Run one to its end."""
        child = self.start(*words, on=on, python=python)
        out, err = child.communicate(timeout=120)
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    def answer(self, *words: object, on: str = "ssh://up", python: str = sys.executable) -> dict[str, Any]:
        """Its result; it has to succeed."""
        done = self.call(*words, "--json", on=on, python=python)
        assert done.returncode == 0, done.stderr + done.stdout
        return dict(json.loads(done.stdout)["result"])

    def left_behind(self) -> list[Path]:
        """What no command may leave there."""
        return list(self.tmp.glob("specmeter-far-*"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("reach")
    (folder / "tmp").mkdir(mode=0o700)
    hop = free_port()
    env = {"TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": str(folder / "tmp"), "XDG_STATE_HOME": str(folder / "st")}
    settings = f"Port {hop}\nPasswordAuthentication yes\nKbdInteractiveAuthentication yes"
    with loopback_sshd(folder / "ssh", settings, env) as sshd:
        sshd.add_host("wrong", IdentityFile=str(sshd.folder / "wrong"))
        yield Host(folder, sshd, hop)
        subprocess.run([sshd.bin / "ssh", "-O", "exit", "up"], capture_output=True, check=False)


def make_engine(folder: Path) -> Path:
    """The engine ``fork`` installed in ``folder``/lib, its recipe, and a program that uses it without end."""
    install(folder / "lib", "fork", {"worker": WORKER})
    (folder / "my.toml").write_text(RECIPE)
    (folder / "loop.py").write_text(LOOP)
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine(tmp_path_factory.mktemp("engine"))


def armed_there(host: Host, engine: Path, python: str, on: str) -> None:
    """Start the engine there under ``python``, arm it, see its hits, and end it."""
    words = ["run", "--recipe", engine / "my.toml", "--", python, engine / "loop.py"]
    child = host.start(*words, on=on, python=python)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n", child.communicate()
        armed = host.answer("arm", on=on, python=python)
        assert [point["armed"] for point in armed["processes"][0]["points"]] == [True, True]

        def hits() -> bool:
            (link,) = host.answer("status", on=on, python=python)["links"]
            return all(point["hits"] for point in link["processes"][0]["points"])

        until(hits, "hits")
    finally:
        child.terminate()
        child.communicate(timeout=60)


# -- ways there --------------------------------------------------------------------------------------------------------


def test_through_a_jump_host(host: Host, engine: Path) -> None:
    words = ("plan", "--path", engine / "lib", "--recipe", engine / "my.toml")
    assert host.answer(*words, on="ssh://behind") == host.answer(*words)


FOUND = [sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")) for minor in (9, 10, 12, 13)]
PYTHONS = [str(paths[-1]) for paths in FOUND if paths]


@pytest.mark.parametrize("python", PYTHONS or [sys.executable], ids=lambda path: Path(path).parents[1].name)
def test_plan_run_arm_and_status_on_every_python(host: Host, engine: Path, python: str) -> None:
    on = f"ssh up env PYTHONPATH={engine / 'lib'}"
    plan = host.answer("plan", "--recipe", engine / "my.toml", on=on, python=python)
    assert len(plan["points"]) == 2 and plan["python"]["executable"] == python
    armed_there(host, engine, python, on)
    until(lambda: not host.left_behind(), "the folder's end")


@pytest.fixture
def mounts() -> Iterator[Callable[..., Path]]:
    with ExitStack() as stack:

        def mount(folder: Path, *words: str) -> Path:
            folder.mkdir(parents=True, exist_ok=True)
            if subprocess.run(["mount", *words, str(folder)], capture_output=True, check=False).returncode:
                pytest.skip("nothing can be mounted here")
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], capture_output=True, check=False)
            return folder

        yield mount


def test_another_root(host: Host, engine: Path, tmp_path: Path, mounts: Callable[..., Path]) -> None:
    """The same programs below another root, with a temporary folder that only that root has."""
    root = mounts(tmp_path / "root", "--bind", "/")
    mounts(root / "proc", "-t", "proc", "proc")
    mounts(root / "dev", "--bind", "/dev")
    mounts(root / "tmp", "-t", "tmpfs", "tmpfs")
    home = make_engine(root / "tmp" / "engine").relative_to(root)
    on = f"chroot {root} env -u XDG_RUNTIME_DIR TMPDIR=/tmp PYTHONPATH=/{home}/lib"
    # The interpreter itself: a virtual environment of a checkout below /tmp is hidden there.
    python = str(Path(sys.executable).resolve())
    found = host.answer("source", "fork.worker", on=on, python=python)["path"]
    assert found == f"/{home}/lib/fork/worker.py" and not Path(found).exists(), "the file is one of that root"
    armed_there(host, Path("/") / home, python, on)
    until(lambda: not list((root / "tmp").glob("specmeter-far-*")), "the folder's end")


def test_into_the_namespaces_of_a_process(host: Host, engine: Path) -> None:
    hold = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "sleep", "600"]
    with subprocess.Popen(hold, stderr=subprocess.DEVNULL) as holder:
        try:
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
            inner = until(lambda: holder.poll() is not None or children.read_text().split(), "the namespace")
            if holder.poll() is not None:
                pytest.skip("namespaces are not allowed here")
            on = f"nsenter --target {inner[0]} --mount --pid --uts env PYTHONPATH={engine / 'lib'} TMPDIR={host.tmp}"
            assert host.answer("source", "fork.worker", on=on)["path"].endswith("fork/worker.py")
            armed_there(host, engine, sys.executable, on)
        finally:
            holder.kill()
    until(lambda: not host.left_behind(), "the folder's end")


def test_over_a_slow_link_in_a_network_of_its_own(host: Host, engine: Path, tmp_path: Path) -> None:
    """4 Mbit/s by tbf on a veth pair: the tool takes longer, and that is all."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("ip and tc are not installed")
    name = f"spm{os.getpid() % 100000}"
    steps = (
        f"ip netns add {name}", f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip addr add 10.254.117.1/30 dev {name}a", f"ip link set {name}a up",
        f"ip -n {name} addr add 10.254.117.2/30 dev {name}b", f"ip -n {name} link set {name}b up",
        f"tc qdisc add dev {name}a root tbf rate 4mbit burst 16kb latency 400ms",
    )  # fmt: skip
    try:
        for step in steps:
            if subprocess.run(step.split(), capture_output=True, check=False).returncode:
                pytest.skip(f"not allowed here: {step}")
        inside = ["ip", "netns", "exec", name]
        env = {"TMPDIR": str(host.tmp)}
        with loopback_sshd(tmp_path / "ssh", "", env, inside, "10.254.117.2") as sshd:
            slow = Host(tmp_path, sshd, 1)
            before = time.monotonic()
            words = ("plan", "--path", engine / "lib", "--recipe", engine / "my.toml")
            assert slow.answer(*words, on="ssh://far") == host.answer(*words)
            assert time.monotonic() - before > 0.2, "150 kB at 4 Mbit/s take 0.3 s: the limit is not on the way"
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


# -- what is refused, and what must not matter -------------------------------------------------------------------------


def in_a_terminal(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run it with a terminal that it could ask on; its code and everything it wrote there. It has 60 s."""
    ours, theirs = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=own_terminal
    ) as child:
        os.close(theirs)
        written = b""
        try:
            code = child.wait(60)
        finally:
            child.kill()
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:
                break
            if not data:
                break
            written += data
    os.close(ours)
    return code, written.decode()


@pytest.mark.parametrize("key", ["wrong", "locked"])
def test_a_password_or_passphrase_is_never_asked_for(host: Host, key: str) -> None:
    locked = host.sshd.folder / "locked"
    if not locked.exists():
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "a passphrase", "-f", str(locked)]
        subprocess.run(words, check=True)
        with (host.sshd.folder / "authorized").open("a") as file:
            file.write(locked.with_suffix(".pub").read_text())
        host.sshd.add_host("locked", IdentityFile=str(locked))
    askpass, asked = host.folder / "askpass", host.folder / "asked"
    askpass.write_text(f"#!/bin/sh\ntouch {asked}\n")
    askpass.chmod(0o755)
    env = {**os.environ, "PATH": f"{host.sshd.bin}:{os.environ['PATH']}", "DISPLAY": ":0"}
    command = [sys.executable, "-m", "specmeter", "--on", f"ssh://{key}", "status"]
    code, said = in_a_terminal(command, {**env, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"})
    assert code == 5 and "Permission denied (publickey,password" in said and "never asks for a password" in said
    assert "'s password:" not in said and "assphrase for key" not in said and not asked.exists()


def test_python_2_is_named(host: Host) -> None:
    for python in sorted(Path.home().glob(".pyenv/versions/2.7.*/bin/python")):
        done = host.call("status", python=str(python))
        assert done.returncode == 5 and "is Python 2" in done.stderr and "--far-python" in done.stderr
    assert host.left_behind() == []


def test_a_temporary_folder_that_runs_nothing(host: Host, tmp_path: Path, mounts: Callable[..., Path]) -> None:
    disk = mounts(tmp_path / "noexec", "-t", "tmpfs", "-o", "noexec,mode=0700", "tmpfs")
    home = make_engine(disk / "engine")
    on = f"ssh up env -u XDG_RUNTIME_DIR TMPDIR={disk} PYTHONPATH={home / 'lib'}"
    armed_there(host, home, sys.executable, on)
    kept = {"engine", f"specmeter-{os.geteuid()}"}
    until(lambda: {path.name for path in disk.iterdir()} == kept, "the folder's end")


@pytest.mark.parametrize("why", ["No space left on device", "File too large"])
def test_no_room_for_the_private_folder(host: Host, tmp_path: Path, mounts: Callable[..., Path], why: str) -> None:
    """A full disk, and a limit on the size of files, which a quota's refusal comes close to."""
    disk = mounts(tmp_path / "full", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs")
    limit = "prlimit --fsize=20000 " if why == "File too large" else ""
    folder = host.tmp if limit else disk
    done = host.call("status", on=f"ssh up env TMPDIR={folder} {limit}".strip())
    assert done.returncode == 5 and why in done.stderr and "set TMPDIR" in done.stderr, done.stderr
    assert list(disk.iterdir()) == [] and host.left_behind() == []


def test_paths_and_file_names_that_a_shell_would_take_for_commands(host: Host, tmp_path: Path) -> None:
    hostile = HOSTILE.replace("INJECTED", "injected")  # relative: wherever a shell would stand
    home = make_engine(tmp_path / hostile.replace("/", ""))
    for name in (hostile, "-rf", "new\nline", "\udcff"):
        (home / "lib" / "fork" / f"{name}.py").write_text("def f(): pass\n")
    temporary = home / "tmp"
    temporary.mkdir(mode=0o700)
    plan = host.answer("plan", "--path", home / "lib", "--recipe", home / "my.toml")
    assert [point["path"] for point in plan["points"]] == [str(home / "lib" / "fork" / "worker.py")] * 2
    host.answer("source", "--package", home / "lib" / "fork")
    target = home / "lib" / "fork" / "__init__.py"
    on = f"ssh up env {_quoted('PYTHONPATH', home / 'lib')} {_quoted('TMPDIR', temporary)}"
    result = host.answer("patch", "apply", "--recipe", home / "my.toml", "--python", sys.executable, on=on)
    assert result["files"] == {str(target): "applied"} and "specmeter patch" in target.read_text()
    assert host.answer("patch", "restore", on=on)["files"] == {str(target): "restored"}
    assert target.read_text() == "" and not list(temporary.glob("specmeter-far-*"))
    found = [path for folder in (Path.cwd(), Path.home(), tmp_path, host.folder) for path in folder.glob("*injected*")]
    assert [path for path in found if path != home] == []


def _quoted(name: str, value: Path) -> str:
    """``NAME=VALUE`` as one word of what ``ssh`` hands to a shell, within the words of a prefix."""
    return shlex.quote(shlex.quote(f"{name}={value}"))
