"""The space of an engine: what this version offers, narrowed or widened by the user's TOML file."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmeter.engines import ServerSpec
from specmeter.engines.flags import flag_value, whole_number
from specmeter.engines.vllm import speculative_config
from specmeter.errors import SpecmeterError
from specmeter.tune.flags import EAGLE_DRAFT_TP, EngineFlags
from specmeter.tune.space import Dimension, Space, settings_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STEPS = (1, 2, 3, 4, 5, 6)
LEAVE = "default"
TP_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
DRAFT_TP = "draft tensor parallel size"
DRAFT_TP_FIELD = "--speculative-config.draft_tensor_parallel_size"
GRAPHS = {
    "sglang": ("--cuda-graph-max-bs", "--cuda-graph-bs", "--cuda-graph-max-bs-decode", "--cuda-graph-bs-decode"),
    "vllm": ("--max-cudagraph-capture-size", "--cudagraph-capture-sizes", "--cuda-graph-sizes"),
}
ATTENTION = {"sglang": "--attention-backend", "vllm": "--attention-backend"}
# Only with several GPUs in tensor parallel: with one no collective runs.
ALL_REDUCE = {"sglang": ("--disable-custom-all-reduce",), "vllm": ("--disable-custom-all-reduce",)}
NCCL: dict[str, tuple[str | None, ...]] = {
    "NCCL_ALGO": (None, "Ring", "Tree"),
    "NCCL_PROTO": (None, "LL", "LL128", "Simple"),
    "NCCL_MIN_NCHANNELS": (None, "8", "16"),
    "NCCL_BUFFSIZE": (None, "1048576", "8388608"),
    "NCCL_NTHREADS": (None, "256", "512"),
    "NCCL_P2P_LEVEL": (None, "NVL", "SYS"),
}
# NVLink SHARP hangs or is forbidden on many machines, so nothing turns it on unless the user's file says it may.
_NVLS = re.compile(r"(?i)nvls")
RULE_KEYS = ("steps", "topk", "draft_tokens")
_KEYS = {"steps", "topk", "draft_tokens", "flags", "env", "skip", "forbid", "allow_nvls"}


@dataclass(frozen=True)
class SpaceFile:
    """What the user's TOML says; empty where it says nothing."""

    steps: tuple[int, ...] = ()
    topk: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()
    knobs: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    forbid: tuple[Mapping[str, str], ...] = ()
    allow_nvls: bool = False


def read_space(path: Path) -> SpaceFile:
    """The ``[space]`` table of a TOML file. Raises SpecmeterError that names what is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecmeterError(f"The space file cannot be read: {path}", error.strerror or str(error)) from None
    except ValueError as error:
        raise SpecmeterError(f"The space file is not valid TOML: {path}", str(error)) from None
    table = document.get("space")
    if not isinstance(table, dict):
        raise SpecmeterError(f"{path} has no [space] table.")
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise SpecmeterError(f"[space] of {path} has unknown keys: {', '.join(unknown)}", f"Known: {sorted(_KEYS)}")
    knobs = {**_knobs(table, "flags", path), **_knobs(table, "env", path)}
    skip = table.get("skip", {})
    forbid = table.get("forbid", [])
    if not isinstance(skip, dict) or not isinstance(forbid, list) or not all(isinstance(r, dict) and r for r in forbid):
        raise SpecmeterError(f"[space] of {path}: skip is a table name = reason, forbid a list of tables.")
    return SpaceFile(
        steps=_numbers(table, "steps", path),
        topk=_numbers(table, "topk", path),
        draft_tokens=_numbers(table, "draft_tokens", path),
        knobs=knobs,
        skip={str(name): str(reason) for name, reason in skip.items()},
        forbid=tuple({str(k): _word(v) for k, v in rule.items()} for rule in forbid),
        allow_nvls=table.get("allow_nvls", False) is True,
    )


def _numbers(table: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...]:
    value = table.get(name, [])
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v <= 64 for v in value):
        raise SpecmeterError(f"[space] of {path}: {name} must be a list of numbers from 0 to 64.")
    if name in table and not value:
        raise SpecmeterError("The space has no feasible point.", f"[space] of {path}: {name} is empty.")
    return tuple(value)


def _knobs(table: Mapping[str, Any], name: str, path: Path) -> dict[str, tuple[str | None, ...]]:
    found: dict[str, tuple[str | None, ...]] = {}
    knobs = table.get(name, {})
    if not isinstance(knobs, dict):
        raise SpecmeterError(f"[space.{name}] of {path} must be a table.")
    for knob, values in knobs.items():
        if (name == "flags") != knob.startswith("--") or not isinstance(values, list) or not values:
            raise SpecmeterError(
                f"[space.{name}] of {path}: {knob} is not usable.",
                "Flags begin with --, variables do not; each has a list of values.",
                f'Write "--flag" = ["{LEAVE}", "value", true], or NAME = ["{LEAVE}", "value"].',
            )
        found[knob] = tuple(None if _word(v) == LEAVE else _word(v) for v in values)
    return found


def _word(value: object) -> str:
    """A value of the file as candidates have it: ``on`` for a switch, ``default`` for a knob left alone."""
    return "on" if value is True else LEAVE if value is False else str(value)


def space_for(
    spec: ServerSpec,
    flags: EngineFlags,
    user: SpaceFile | None = None,
    nccl_cannot: str | None = None,
    exported: Mapping[str, str] | None = None,
) -> Space:
    """The space of ``spec``'s engine in its version: defaults that it offers, then the user's words over them.

    ``nccl_cannot`` is why no variable of NCCL can help, where a profile has shown that: then none is tried unasked.
    Nor is one that the server inherits, as ``exported`` tells.
    Raises SpecmeterError for a flag that this version does not have, a variable that turns NVLS on, or no point.
    """
    user = user or SpaceFile()
    knobs, skipped = _defaults(spec, flags, nccl_cannot, exported or {})
    knobs |= user.knobs
    _check_knobs(user, flags)
    unheard, several = _draft_tp(spec, flags), tensor_parallel(spec) > 1
    if unheard and (knobs.pop(DRAFT_TP_FIELD, None) is not None or several):
        skipped.append((DRAFT_TP, unheard))
    elif several and DRAFT_TP_FIELD not in knobs:
        skipped.append((DRAFT_TP, f"not tried unasked; name {DRAFT_TP_FIELD} in the space file"))
    for name, reason in user.skip.items():
        if knobs.pop(name, None) is not None:
            skipped.append((name, reason))
    topk = user.topk or (1,)
    if max(topk) > 1 and not user.draft_tokens:
        raise SpecmeterError("A tree needs its size.", "topk is above 1.", "Give draft_tokens = [8, 12] too.")
    if max(topk) > 1 and spec.engine == "vllm":
        raise SpecmeterError("vLLM drafts chains only.", "The space has topk above 1.", "Leave topk out.")
    settings = settings_of([0, *(user.steps or STEPS)], topk, user.draft_tokens)
    dimensions = tuple(Dimension(name, values) for name, values in sorted(knobs.items()))
    _check_rules(user, {*RULE_KEYS, *knobs, *user.knobs, *NCCL, *flags.choices})
    space = Space(settings, dimensions, user.forbid, tuple(skipped), flags.source)
    next(space.candidates())
    return space


def _defaults(
    spec: ServerSpec, flags: EngineFlags, nccl_cannot: str | None, exported: Mapping[str, str]
) -> tuple[dict[str, tuple[str | None, ...]], list[tuple[str, str]]]:
    """Knobs tried without being asked for, and those left out with the reason."""
    engine = spec.engine or ""
    knobs: dict[str, tuple[str | None, ...]] = {}
    skipped: list[tuple[str, str]] = []
    attention = ATTENTION.get(engine)
    if attention is not None:
        choices = flags.of(attention)
        if not flags.has(attention):
            skipped.append((attention, "this version has no such flag"))
        elif not choices:
            skipped.append((attention, "this version lists no choices; name some in the space file"))
        else:
            skipped.append((attention, f"not tried unasked; this version has {', '.join(choices)}"))
    graphs = [flag for flag in GRAPHS.get(engine, ()) if flags.has(flag)]
    if graphs:
        skipped.append(("graph sizes", f"not tried unasked; name sizes for {' or '.join(graphs)} in the space file"))
    ranks = tensor_parallel(spec)
    if engine == "embedded":
        skipped.append(("NCCL and all-reduce", "the embedded engine has no collectives"))
    elif ranks < 2:
        skipped.append(("NCCL and all-reduce", "tensor parallel size is 1: no collective runs, so none can matter"))
    else:
        knobs |= {flag: (None, "on") for flag in ALL_REDUCE.get(engine, ()) if flags.has(flag)}
        given = {**exported, **spec.env}
        tried = [name for name in NCCL if name not in given and nccl_cannot is None]
        knobs |= {name: NCCL[name] for name in tried}
        skipped += [(name, f"set by the user's environment ({given[name]})") for name in NCCL if name in given]
        skipped += [("NCCL's variables", nccl_cannot)] if nccl_cannot is not None else []
    return knobs, skipped


def _draft_tp(spec: ServerSpec, flags: EngineFlags) -> str:
    """Why the draft cannot have a tensor parallel size of its own here; empty where the engine honours one."""
    if spec.engine == "sglang":
        return "SGLang has no flag for it: the draft runs in the target's group"
    if spec.engine != "vllm":
        return "this engine has one process"
    method = (speculative_config(spec.command) or {}).get("method")
    if method == "draft_model" or EAGLE_DRAFT_TP in flags.fields:
        return ""
    return "vLLM takes draft_tensor_parallel_size, and its EAGLE draft is built without it: no module of it reads it"


def tensor_parallel(spec: ServerSpec) -> int:
    """The tensor parallel size that the command states; 1 if it states none."""
    size = whole_number(flag_value(spec.command, *TP_FLAGS))
    return size if size is not None and size >= 0 else 1


def _check_rules(user: SpaceFile, known: set[str]) -> None:
    """A rule that names something else would forbid nothing, and nobody would see it."""
    for name in sorted({name for rule in user.forbid for name in rule} - known):
        near = difflib.get_close_matches(name, sorted(known), 1)
        raise SpecmeterError(
            f"`forbid` names {name}, which is no part of the space.",
            f"Its parts are {', '.join(RULE_KEYS)}, the flags and the variables.",
            f"Near: {near[0]}." if near else "",
        )


def _check_knobs(user: SpaceFile, flags: EngineFlags) -> None:
    for name, values in user.knobs.items():
        if name.startswith("--") and not flags.has(name) and not _is_field(name, flags):
            near = difflib.get_close_matches(name, list(flags.choices), 3)
            raise SpecmeterError(
                f"This version of the engine has no flag {name}.",
                f"Read from {flags.source}.",
                f"Near: {', '.join(near)}." if near else "",
            )
        _check_values(name, values, flags.of(name) if name.startswith("--") else ())
        if (
            not user.allow_nvls
            and (_NVLS.search(name) or any(_NVLS.search(v or "") for v in values))
            and not _off(values)
        ):
            raise SpecmeterError(
                f"{name} would turn NVLS on.",
                "Many machines forbid NVLink multicast, and a server that tries it there may hang.",
                "If this one allows it, say allow_nvls = true in [space].",
            )


def _is_field(name: str, flags: EngineFlags) -> bool:
    """Whether it is ``--speculative-config.FIELD`` with a field of vLLM's configuration in this version."""
    head, dot, field_name = name.partition(".")
    return bool(dot) and head == "--speculative-config" and field_name in flags.fields


def _off(values: Sequence[str | None]) -> bool:
    return all(value in (None, "0") for value in values)


def _check_values(name: str, values: Sequence[str | None], choices: Sequence[str]) -> None:
    wrong = [value for value in values if value not in (None, "on") and choices and value not in choices]
    if wrong:
        raise SpecmeterError(f"{name} has no value {wrong[0]} in this version.", f"It has {', '.join(choices)}.")
