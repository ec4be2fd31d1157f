"""The controller's side of a patch: which files, the link, and the program that patches beside the server."""

from __future__ import annotations

import base64
import getpass
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specmeter.runtime
from specmeter import __version__
from specmeter.control.link import (
    Link,
    check_free,
    check_private,
    checked_id,
    default_base,
    make_link,
    open_link,
    remove_link,
    sweep,
)
from specmeter.control.processes import processes
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.far_program import run_program
from specmeter.recipes.planner import Planned

FAR = Path(__file__).parent / "far.py"
LINK_S = 5.0


@dataclass(frozen=True)
class Target:
    """One file that would take the lines, with what ``preview`` says of it, and the plan's modules below it."""

    path: str
    preview: dict[str, Any]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Applied:
    """What applying did: the link, and for each file ``applied`` or ``already``."""

    link: Link
    outcomes: dict[str, str]
    link_made: bool


def targets_of(plan: Mapping[str, Any], python: Path) -> tuple[list[Target], dict[str, str]]:
    """The files that activate the runtime before any module of the plan runs, and modules that none is for, with why.

    That is the outermost package's ``__init__``: each process that imports a module of the plan imports it first.
    Changes nothing. Raises SpecmeterError when that Python does not work.
    """
    modules = {point["module"]: point["path"] for point in plan["points"]}
    names = list(modules)
    groups = [_packages(name, modules[name]) for name in names]
    reply = ask(python, {"op": "preview", "candidates": groups})
    found: dict[str, list[str]] = {}
    unreached = {}
    for name, path in zip(names, reply["targets"]):  # noqa: B905 (3.9)
        if path is None:
            unreached[name] = "no package around it has an __init__.py, and its own file must stay as it was planned"
        elif path == os.path.realpath(modules[name]):
            unreached[name] = "it is the file that takes the lines, so it is not the file that was planned"
        if path is not None:
            found.setdefault(path, []).append(name)
    return [Target(path, reply["files"][path], tuple(names)) for path, names in sorted(found.items())], unreached


def apply(
    planned: Planned,
    python: Path,
    *,
    link_id: str | None = None,
    armed: bool = False,
    capacity: int | None = None,
    command: Sequence[str] = (),
) -> Applied:
    """Patch the files for a plan, with a link for its processes; a patch that is there already stays as it is.

    Raises SpecmeterError with exit 3 when a file refuses: then none is patched, and no link is left; or when it is
    patched for another plan, or for another link than the one that ``link_id`` asks for.
    """
    targets, _ = targets_of(planned.plan, python)
    if not targets:
        raise SpecmeterError("No file can take the lines of a patch.", "No module of the plan is in a package.")
    _raise_refusals(targets)
    path, made = _link_path(targets, link_id)
    if not made:
        _check_same_plan(planned, open_link(path))
    files = {name: base64.b64encode(data).decode() for name, data in _folder_files(path).items()}
    facts = {
        "id": secrets.token_hex(4),
        "link": str(path),
        "engine": planned.plan["engine"],
        "engine_version": planned.plan["engine_version"],
        "python": str(python),
        "specmeter": __version__,
        "by": f"{_user()}@{socket.gethostname()}",
    }
    outcomes: dict[str, str] = {}
    try:
        for target in targets:
            request = {"op": "apply", "path": target.path, "files": files, "facts": facts}
            outcomes[target.path] = ask(python, {**request, "expected": _planned_hash(target)})["outcome"]
        others = _link_made_meanwhile(targets, outcomes, python, link_id)
        if others is not None:
            _check_same_plan(planned, others)
            return Applied(others, outcomes, False)
        # Last: what a kill leaves then is found by its manifest, and without a link the lines do nothing.
        link = _make(planned, path, armed, capacity, command) if made else open_link(path)
    except SpecmeterError:
        for name, outcome in outcomes.items():
            if outcome == "applied":
                ask(python, {"op": "restore", "path": name})
        raise
    return Applied(link, outcomes, made)


def restore(path: str, python: Path | None = None, keep_changes: bool = False) -> str:
    """Put one file back: ``restored``, ``already`` or ``kept``. Raises SpecmeterError with exit 3 when it refuses."""
    request = {"op": "restore", "path": os.path.abspath(path), "keep_changes": keep_changes}
    return str(ask(python or Path(sys.executable), request)["outcome"])


def look(paths: Sequence[str] = (), python: Path | None = None) -> list[dict[str, Any]]:
    """The state of those files, or of all that this user has patched."""
    request = {"op": "look", "paths": [os.path.abspath(path) for path in paths]}
    states: list[dict[str, Any]] = ask(python or Path(sys.executable), request)["states"]
    return states


def ask(python: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run ``far.py`` under ``python``. Raises SpecmeterError: exit 3 when it refuses, 5 when that Python fails."""
    answer = run_program(python, FAR, request)
    if "refused" in answer:
        raise refusal(answer["refused"])
    reply: dict[str, Any] = answer["ok"]
    return reply


def refusal(refused: Mapping[str, str]) -> SpecmeterError:
    """A refusal of the program beside the server, as an error; a difference goes into the reason."""
    why = refused["why"] + (f"\n{refused['diff']}" if refused.get("diff") else "")
    return SpecmeterError(refused["what"], why, refused["next"], Exit.REFUSED)


def _packages(module: str, path: str) -> list[str]:
    """The ``__init__.py`` files around a module, outermost first; whether they exist is for the far side to see."""
    parts = module.split(".")
    folder = os.path.dirname(path)
    if os.path.basename(path) != "__init__.py":
        parts = parts[:-1]
    found = []
    while parts and os.path.basename(folder) == parts[-1]:
        found.append(os.path.join(folder, "__init__.py"))
        folder = os.path.dirname(folder)
        parts = parts[:-1]
    return found[::-1]


def _raise_refusals(targets: Sequence[Target]) -> None:
    for target in targets:
        if "refused" in target.preview:
            raise refusal(target.preview["refused"])


def _planned_hash(target: Target) -> str | None:
    return None if target.preview["manifest"] else target.preview["sha256"]


def _link_path(targets: Sequence[Target], link_id: str | None) -> tuple[Path, bool]:
    """The folder of the link that the files name already, else of a new one; and whether it has to be made."""
    named = {target.preview["manifest"]["link"] for target in targets if target.preview["kind"] == "applied"}
    if len(named) > 1:
        raise SpecmeterError(
            "The files are patched for different links.", ", ".join(sorted(named)), "Restore them first.", Exit.REFUSED
        )
    if not named:
        path = default_base() / checked_id(link_id)
        check_free(path)
        return path, True
    path = Path(named.pop())
    _check_wanted(path, link_id)
    if (path / "link.json").is_file():
        return path, False
    let_go(path)  # the rest of one that was being removed
    return path, True


def _check_wanted(there: Path, link_id: str | None) -> None:
    """Raise SpecmeterError (exit 3) when another link was asked for than the one that a file is patched for."""
    if link_id not in (None, there.name):
        raise SpecmeterError(
            f"It is patched already, for the link {there.name}.",
            f"Its processes run with that one only; a link {link_id} would stay empty.",
            f"Use the link {there.name}, or `specmeter patch restore` first, then apply again.",
            Exit.REFUSED,
        )


def _link_made_meanwhile(
    targets: Sequence[Target], outcomes: Mapping[str, str], python: Path, link_id: str | None
) -> Link | None:
    """The link of another ``apply`` that has patched the files since they were looked at; None if there was none."""
    late = [one.path for one in targets if outcomes[one.path] == "already" and one.preview["kind"] != "applied"]
    if not late:
        return None
    busy = SpecmeterError(
        f"Another specmeter is patching {late[0]}.",
        next_step="Wait for it, then look at `specmeter patch status`.",
        exit=Exit.REFUSED,
    )
    manifest = look([late[0]], python)[0]["manifest"]
    if not manifest or "applied" in outcomes.values():
        raise busy
    path = Path(manifest["link"])
    _check_wanted(path, link_id)
    until = time.monotonic() + LINK_S
    while not (path / "link.json").is_file():  # it makes its link last
        if time.monotonic() > until:
            raise busy
        time.sleep(0.05)
    return open_link(path)


def _check_same_plan(planned: Planned, link: Link) -> None:
    there = link.plan()
    if there["points"] == planned.plan["points"]:
        return
    each = [
        f"{plan['engine']} {plan['engine_version']}, places: {len(plan['points'])}, recipe {plan['recipe_sha256'][:12]}"
        for plan in (there, planned.plan)
    ]
    raise SpecmeterError(
        "It is patched already, for another plan.",
        f"Its link {link.id} has {each[0]}; this is {each[1]}.",
        "`specmeter patch restore` first, then apply again.",
        Exit.REFUSED,
    )


def _make(planned: Planned, path: Path, armed: bool, capacity: int | None, command: Sequence[str]) -> Link:
    if path.parent != default_base():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_link(
        planned.plan, planned.code, link_id=path.name, base=path.parent, command=command, armed=armed,
        capacity=capacity,
    )  # fmt: skip


def let_go(path: Path) -> list[int]:
    """Remove the link of a patch, or what is left of it, unless a server still runs with it: then the pids of those."""
    sweep(path.parent)
    if not path.is_dir():
        return []
    check_private(path)
    link = Link(path.name, path)
    alive = [process.pid for process in processes(link, alive_only=True)]
    if not alive:
        remove_link(link)
    return alive


def _folder_files(link: Path) -> dict[str, bytes]:
    """What goes into the folder beside the patched file: the runtime's sources, the start program, the link's path."""
    runtime = Path(specmeter.runtime.__file__).parent
    files = {f"runtime/{path.name}": path.read_bytes() for path in sorted(runtime.glob("*.py"))}
    files["start.py"] = (Path(__file__).parent / "start.py").read_bytes()
    files["link"] = os.fsencode(link)
    return files


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
