"""What stands between this user and a process: each obstacle by its exact name, and what removes it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SYS_PTRACE = 19
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class Obstacle:
    """Why a route is closed, and the fix."""

    why: str
    fix: str


@dataclass(frozen=True)
class Facts:
    """What ``/proc`` tells of the process and of this one. ``scope``: Yama's ptrace_scope, 0 without Yama."""

    pid: int
    uid: int
    own_uid: int
    capable: bool
    scope: int
    tracer: int
    state: str
    dumpable: bool
    covers: bool
    same_pid_namespace: bool
    same_mount_namespace: bool


def gather(pid: int) -> Facts | Obstacle:
    """The facts of a process, or the obstacle that there is none to be seen."""
    base = Path(f"/proc/{pid}")
    try:
        fields = _fields(base / "status")
        own = _fields(Path("/proc/self/status"))
        owner = base.stat().st_uid
    except OSError:
        return Obstacle(
            f"there is no process {pid}",
            "It has ended, or runs in another container or machine: run specmeter there (docker exec, ssh).",
        )
    uid, permitted = int(fields["Uid"].split()[0]), int(own["CapEff"], 16)
    covers = int(fields["CapPrm"], 16) & ~permitted == 0
    return Facts(
        pid=pid,
        uid=uid,
        own_uid=os.geteuid(),
        capable=bool(permitted >> _SYS_PTRACE & 1),
        scope=int(_SCOPE.read_text()) if _SCOPE.exists() else 0,
        tracer=int(fields["TracerPid"]),
        state=fields["State"].split()[0],
        # The kernel gives what is not dumpable to root, which tells nothing of root's own processes.
        dumpable=owner == uid and (_may_look(base / "exe") or not covers),
        covers=covers,
        same_pid_namespace=_same_namespace(pid, "pid"),
        same_mount_namespace=_same_namespace(pid, "mnt"),
    )


def common(facts: Facts) -> Obstacle | None:
    """What closes every route, or None."""
    if facts.uid != facts.own_uid:
        # Also for root: the runtime trusts a link of its own user only, and has to write its ring there.
        who = _name(facts.uid)
        return Obstacle(
            f"process {facts.pid} belongs to another user ({who}); you are {_name(facts.own_uid)}",
            f"Run this as that user: `sudo -u {who.split()[0]} specmeter attach {facts.pid}`.",
        )
    if facts.state in ("Z", "X"):
        return Obstacle(f"process {facts.pid} has ended and only waits to be collected", "Nothing can be attached to.")
    if not facts.same_pid_namespace or not facts.same_mount_namespace:
        which = "process" if not facts.same_pid_namespace else "file system"
        return Obstacle(
            f"process {facts.pid} lives in another {which} namespace (a container)",
            f"Run specmeter inside it: docker exec, kubectl exec, or `nsenter -t {facts.pid} -a`.",
        )
    return None


def for_ptrace(facts: Facts) -> Obstacle | None:
    """What keeps a debugger from the process (ptrace(2), "Ptrace access mode checking"; Yama), or None."""
    if facts.tracer:
        return Obstacle(
            f"process {facts.pid} is traced by process {facts.tracer} (a debugger or strace)", "End that one first."
        )
    if facts.state in ("T", "t"):
        return Obstacle(f"process {facts.pid} is stopped", f"Let it go on: `kill -CONT {facts.pid}`.")
    if facts.scope == 3:
        return Obstacle(
            "kernel.yama.ptrace_scope is 3: nobody may trace anything until this machine is started anew",
            "Start the server under `specmeter run`, or use `specmeter patch`.",
        )
    if facts.capable:
        return None
    if facts.scope == 2:
        return Obstacle(
            "kernel.yama.ptrace_scope is 2: only CAP_SYS_PTRACE may trace",
            "Run as root, or give the container the capability (docker run --cap-add SYS_PTRACE).",
        )
    if facts.scope == 1:
        return Obstacle(
            "kernel.yama.ptrace_scope is 1: a process may be traced by its parents only",
            "As root: `sysctl kernel.yama.ptrace_scope=0`, or run this with CAP_SYS_PTRACE.",
        )
    if not facts.dumpable:
        return Obstacle(
            f"process {facts.pid} is marked as not dumpable (it changed its user, or asked for it)",
            "Run this as root with CAP_SYS_PTRACE.",
        )
    if not facts.covers:
        return Obstacle(
            f"process {facts.pid} holds capabilities that you do not, and CAP_SYS_PTRACE is missing here",
            "Give the container the capability: docker run --cap-add SYS_PTRACE, or securityContext.capabilities.add.",
        )
    return None


def for_remote_exec(version: tuple[int, int], argv: Sequence[str], env: dict[str, str], has: bool) -> Obstacle | None:
    """What keeps ``sys.remote_exec`` from the process (PEP 768), or None. ``has``: its interpreter has the function."""
    if version < (3, 14):
        return Obstacle(f"Python {version[0]}.{version[1]} has no sys.remote_exec", "It came with Python 3.14.")
    if not has:
        return Obstacle(
            "this Python was built without remote debugging (--without-remote-debug)", "Use gdb, or another build."
        )
    if env.get("PYTHON_DISABLE_REMOTE_DEBUG"):
        return Obstacle(
            "remote debugging is disabled: PYTHON_DISABLE_REMOTE_DEBUG is set",
            "Start the server without that variable.",
        )
    options = " ".join(argv[1:])
    if re.search(r"-X\s?disable[-_]remote[-_]debug", options):
        return Obstacle(
            "remote debugging is disabled: -X disable-remote-debug", "Start the server without that option."
        )
    return None


def for_gdb(version: tuple[int, int], exported: set[str], needed: set[str]) -> Obstacle | None:
    """What keeps gdb from calling into the process, or None."""
    if shutil.which("gdb") is None:
        return Obstacle("gdb is not on PATH", "Install it (apt-get install gdb, dnf install gdb).")
    if version < (3, 9):
        return Obstacle(f"the process runs Python {version[0]}.{version[1]}", "The runtime needs CPython 3.9 or later.")
    missing = sorted(needed - exported)
    if missing:
        return Obstacle(
            f"its interpreter is a static build that does not export {', '.join(missing)}",
            "Start the server under `specmeter run`, or use `specmeter patch`.",
        )
    return None


def _fields(path: Path) -> dict[str, str]:
    lines = path.read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _may_look(link: Path) -> bool:
    """Whether the kernel's check for ptrace lets this process read that link of ``/proc``.

    Files there, ``environ`` for one, are open to CAP_PERFMON too.
    """
    try:
        link.readlink()
    except PermissionError:
        return False
    except OSError:
        return True  # it has just ended: another obstacle will say so
    return True


def _same_namespace(pid: int, kind: str) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/{kind}").readlink() == Path(f"/proc/self/ns/{kind}").readlink()
    except OSError:
        return True  # not ours to see: another obstacle will say why


def _name(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"#{uid}"
