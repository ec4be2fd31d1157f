"""A real sshd on loopback with keys of its own, and an ``ssh`` that uses a configuration of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.children import until

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
USABLE = SSHD is not None and shutil.which("ssh-keygen") is not None and os.geteuid() == 0
WHY_NOT = "needs sshd (apt-get install openssh-server) and root, to start one of its own"


@dataclass(frozen=True)
class Loopback:
    """An sshd and the folder of its keys; ``bin`` holds the ``ssh`` to put first on PATH."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    address: str = "127.0.0.1"

    @property
    def bin(self) -> Path:
        """The folder of ``ssh``."""
        return self.folder / "bin"

    def add_host(self, name: str, port: int | None = None, **options: str) -> None:
        """Add a host to the client's configuration: this sshd, by way of ``port`` (a proxy) if given."""
        settings = {
            "HostName": self.address,
            "Port": str(port or self.port),
            "User": "root",
            "IdentityFile": str(self.folder / "key"),
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": str(self.folder / "known"),
            "HostKeyAlias": "loopback",
            **options,
        }
        with (self.folder / "config").open("a") as file:
            file.write(f"Host {name}\n" + "".join(f"  {key} {value}\n" for key, value in settings.items()))


@contextmanager
def loopback_sshd(
    folder: Path,
    settings: str = "",
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    address: str = "127.0.0.1",
) -> Iterator[Loopback]:
    """Start an sshd with ``settings`` before its own and ``env`` in every session; end it at the end.

    ``prefix`` are words before its command, with the ``address`` that it has then (a network namespace).
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("host", "key", "wrong"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    variables = " ".join(f"{key}={value}" for key, value in (env or {}).items())
    (folder / "sshd").write_text(
        f"{settings}\nPort {port}\nListenAddress {address}\n"
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPidFile none\n"
        f"PermitRootLogin yes\n{'SetEnv ' + variables if variables else ''}\n"
    )
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"loopback {host_key}\n")
    (folder / "config").write_text("")
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    command = [*prefix, str(SSHD), "-D", "-e", "-f", str(folder / "sshd")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: connects(port, address), "sshd")
        loopback = Loopback(folder, port, process, address)
        loopback.add_host("far")
        yield loopback
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connects(port: int, address: str = "127.0.0.1") -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True
