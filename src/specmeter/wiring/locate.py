"""Where the engine's source is: in a Python environment, in a folder, or nowhere (then its released version counts)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.wiring.tree import Tree

# Checked when no engine is named.
ENGINES = ("sglang", "vllm")
_KNOWN = (*ENGINES, "specmeter")
_ALIASES = {"embedded": "specmeter"}
# Top-level packages are found without importing them; importing an engine takes seconds and may touch a GPU.
_QUESTION = """
import importlib.metadata, importlib.util, json
found = {}
for name in NAMES:
    spec = importlib.util.find_spec(name)
    where = list(spec.submodule_search_locations or []) if spec else []
    if where:
        found[name] = {"package": where[0], "version": "", "dist": ""}
        for dist in (name, name + "-cpu"):
            try:
                found[name].update(version=importlib.metadata.version(dist), dist=dist)
            except importlib.metadata.PackageNotFoundError:
                pass
found["triton"] = importlib.util.find_spec("triton") is not None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Engine:
    """One engine to check against: its source tree if there is one, and its version if that is known."""

    name: str
    version: str
    tree: Tree | None
    has_triton: bool = True


def parse_engine(text: str) -> tuple[str, str]:
    """``sglang==0.5.16`` as ("sglang", "0.5.16"); the version is empty when not given."""
    name, equals, version = text.partition("==")
    name = _ALIASES.get(name, name)
    if name not in _KNOWN:
        raise SpecmeterError(
            f"unknown engine {name!r}", "Its wiring is not known here.", f"Known: {', '.join(_KNOWN)}."
        )
    if equals and not version.strip():
        raise SpecmeterError(
            f"--engine {text} names no version",
            "Nothing follows the two equals signs.",
            f"--engine {name}==VERSION; or --engine {name} with --python EXE or --path DIR.",
        )
    return name, version


def in_environment(python: str, name: str) -> Engine:
    """The engine as a Python executable would import it."""
    found = _ask(python, (name,))
    if name not in found:
        raise SpecmeterError(
            f"{name} is not installed for {python}",
            next_step="Give the Python that starts the server, or --path DIR.",
            exit=Exit.ENVIRONMENT,
        )
    return _found_engine(name, found)


def installed(python: str) -> list[Engine]:
    """The engines that a Python executable would import; specmeter's own only where there is no other.

    Raises SpecmeterError (exit 5) where there is none.
    """
    found = _ask(python, _KNOWN)
    names = [name for name in ENGINES if name in found]
    if not names and "specmeter" in found:
        return [Engine("specmeter", found["specmeter"]["version"], None)]
    if not names:
        raise SpecmeterError(
            f"no engine is installed for {python}",
            f"It has none of {', '.join(ENGINES)}.",
            "Give the Python that starts the server, or --engine NAME with --path DIR.",
            Exit.ENVIRONMENT,
        )
    return [_found_engine(name, found) for name in names]


def _ask(python: str, names: Sequence[str]) -> dict[str, Any]:
    """Which of the packages the interpreter has, where and in which version, and whether Triton is there."""
    question = _QUESTION.replace("NAMES", repr(list(names)))
    try:
        done = subprocess.run(
            [python, "-c", question], capture_output=True, text=True, timeout=60, cwd="/", check=False
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise SpecmeterError(f"cannot run {python}", why=str(fault), exit=Exit.ENVIRONMENT) from None
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise SpecmeterError(f"{python} gave no answer", why=done.stderr[-300:], exit=Exit.ENVIRONMENT) from None
    return found


def _found_engine(name: str, found: Mapping[str, Any]) -> Engine:
    # vLLM turns Triton off where no GPU driver is active; a build for CPUs never has one.
    triton = bool(found["triton"]) and not str(found[name]["dist"]).endswith("-cpu")
    return Engine(name, found[name]["version"], Tree(Path(found[name]["package"])), triton)


def in_folder(folder: Path, name: str, version: str = "") -> Engine:
    """The engine in a source folder: the package itself, its parent, or a repository."""
    for candidate in (folder, folder / name, folder / "python" / name):
        inner = "srt" if name == "sglang" else "model_executor"
        if candidate.name == name and (candidate / inner).is_dir():
            cpu = any(candidate.parent.glob(f"{name}_cpu-*.dist-info"))
            return Engine(name, version or _version_beside(candidate), Tree(candidate), not cpu)
    raise SpecmeterError(f"there is no {name} package in {folder}", next_step="Give the folder that contains it.")


def _version_beside(package: Path) -> str:
    for path in package.parent.glob(f"{package.name}*.dist-info/METADATA"):
        found = re.search(r"^Version: (\S+)$", path.read_text("utf-8", "replace"), re.MULTILINE)
        if found is not None:
            return found.group(1)
    for name in ("_version.py", "version.py"):
        path = package / name
        if path.is_file():
            found = re.search(r"__version__ = version = ['\"]([^'\"]+)|__version__ = ['\"]([^'\"]+)", path.read_text())
            if found is not None:
                return found.group(1) or found.group(2)
    return ""
