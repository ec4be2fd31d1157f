"""What ``--on`` may name: ``ssh://[USER@]HOST[:PORT]``, or any command that runs what is appended to it."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specmeter.errors import Exit, SpecmeterError

# Nothing here may begin with '-': the client would take it for an option.
_SSH = re.compile(
    r"ssh://(?:(?P<user>[\w.][\w.+-]*)@)?(?P<host>[\w.][\w.-]*|\[[0-9a-fA-F:.]+(?:%\w+)?\])(?::(?P<port>\d+))?/?"
)
# The user's own configuration, agent, jump hosts and control sockets count; these keep it from asking or hanging.
SSH_OPTIONS = ("-T", "-oBatchMode=yes", "-oConnectTimeout=15", "-oServerAliveInterval=10", "-oServerAliveCountMax=3")


@dataclass(frozen=True)
class Host:
    """Somewhere to run a command. ``prefix`` are the words before it; ``shell`` says that it is given as one string."""

    name: str
    prefix: tuple[str, ...]
    shell: bool

    def command(self, words: Sequence[str]) -> list[str]:
        """The local command that runs ``words`` there; for ssh, quoted for the login shell."""
        return [*self.prefix, shlex.join(words)] if self.shell else [*self.prefix, *words]


def parse(text: str) -> Host:
    """The host that ``text`` names. Raises SpecmeterError."""
    if text.startswith("ssh:"):
        return _ssh(text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecmeterError(f"--on {text!r} cannot be read.", f"{error}.") from None
    if not words or "://" in words[0]:
        raise SpecmeterError(
            f"--on {text!r} names no host.",
            next_step='As in ssh://user@host, "docker exec -i NAME", or any exec prefix.',
        )
    _check_program(words[0])
    if Path(words[0]).name == "ssh":
        # Its words are joined and given to a login shell, so what is appended has to be quoted.
        return Host(text, (words[0], *SSH_OPTIONS, *words[1:]), shell=True)
    return Host(text, tuple(words), shell=False)


def _ssh(text: str) -> Host:
    match = _SSH.fullmatch(text)
    if match is None:
        raise SpecmeterError(
            f"--on {text!r} is no SSH address.",
            "It reads ssh://[USER@]HOST[:PORT]; HOST may be an alias of ~/.ssh/config.",
            "Everything else about the connection belongs in ~/.ssh/config (ProxyJump, IdentityFile, ControlPath).",
        )
    _check_program("ssh")
    user = ["-l", match["user"]] if match["user"] else []
    port = ["-p", match["port"]] if match["port"] else []
    host = match["host"].strip("[]")
    return Host(text, ("ssh", *SSH_OPTIONS, *user, *port, "--", host), shell=True)


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise SpecmeterError(
            f"{name} is not there.", "It is neither a program on PATH nor an executable file.", exit=Exit.ENVIRONMENT
        )
