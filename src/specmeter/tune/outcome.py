"""What a tune leaves for use: a server file, a command to run, the engine's own configuration, steps by batch size."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.bench.arms import CompareArm
from specmeter.engines import Setting
from specmeter.engines.flags import Command, flag_value
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.whole import NotSaved
from specmeter.tune.flags import BY_BATCH, NO_DRAFTS, EngineFlags, program_of

_FLAG = re.compile(r"--?[A-Za-z]")
# vLLM's short flags (engine/arg_utils.py, cli_args.py); SGLang's have long names only.
SHORT = {
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel", "-dcp": "decode-context-parallel-size", "-q": "quantization",
    "-n": "nnodes", "-r": "node-rank", "-sc": "speculative-config", "-cc": "compilation-config",
}  # fmt: skip
ADAPTIVE_FLAG = "--speculative-adaptive-config"
BATCH_FIELD = "num_speculative_tokens_per_batch_size"
LARGEST_BATCH = 65536


def write_outcome(folder: Path, arms: Mapping[int, CompareArm], engine: str, flags: EngineFlags) -> list[str]:
    """Write the files (0600) into ``folder``; returns their names.

    ``arms`` is what is to be run by concurrency level. One level gives ``tuned.toml``, ``tuned.sh`` and, where the
    engine takes ``--config``, ``engine-config.yaml``; several give each its own, ``tuned-8.toml`` and so on. Secrets
    are masked, as in everything that is stored. Raises NotSaved.
    """
    files: dict[str, str] = {}
    for level, arm in arms.items():
        at = f"-{level}" if len(arms) > 1 else ""
        command, env = tuple(mask_command(arm.spec.command)), mask_env(arm.spec.env)
        files[f"tuned{at}.toml"] = server_table(engine, command, env, f"tuned{at}")
        files[f"tuned{at}.sh"] = f"#!/bin/sh\n{command_line(command, env)}\n"
        if engine in ("sglang", "vllm") and flags.has("--config"):
            files[f"engine-config{at}.yaml"] = engine_config(command)
    table = table_of(engine, arms, flags)
    if not isinstance(table, NoTable):
        files[table[0]] = table[1]
    try:
        for name, text in files.items():
            with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
    except OSError as error:
        raise NotSaved.into(folder, error) from error
    return sorted(files)


def command_line(command: Sequence[str], env: Mapping[str, str]) -> str:
    """One line for a shell, everything quoted."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())]
    return " ".join([*variables, shlex.join(command)])


def server_table(engine: str, command: Sequence[str], env: Mapping[str, str], name: str = "tuned") -> str:
    """A ``[server.NAME]`` for ``--server FILE``. JSON strings are TOML basic strings."""
    words = ", ".join(json.dumps(word) for word in command)
    pairs = ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in sorted(env.items()))
    return f'[server.{name}]\nengine = "{engine}"\ncommand = [{words}]\nenv = {{ {pairs} }}\n'


def engine_config(command: Command) -> str:
    """The command's arguments as the YAML file that both engines take with ``--config``; values are JSON.

    The model of ``vllm serve MODEL`` is the key ``model``. A short flag without a long name that is known here stays
    out, in a comment that says so.
    """
    words = _arguments(command)
    lines: list[str] = []
    index = 0
    while index < len(words) and not _FLAG.match(words[index]):
        index += 1
    if index == 1:
        lines.append(f"model: {json.dumps(words[0])}")
    while index < len(words):
        name, equals, inline = words[index].partition("=")
        index += 1
        values = [inline] if equals else []
        while not equals and index < len(words) and not _FLAG.match(words[index]):
            values.append(words[index])
            index += 1
        value: Any = True if not values else values[0] if len(values) == 1 else values
        key = name.removeprefix("--") if name.startswith("--") else SHORT.get(name)
        if key is None:
            lines.append(f"# not in this file, give it on the command line: {shlex.join([name, *values])}")
        else:
            lines.append(f"{key}: {json.dumps(_number(value))}")
    return "\n".join(lines) + "\n"


def _arguments(command: Command) -> list[str]:
    """The words after the program: after ``-m MODULE`` and after ``serve``; else from the first flag on."""
    words = list(command)
    if "-m" in words[:-1]:
        words = words[words.index("-m") + 2 :]
        return words[1:] if words[:1] == ["serve"] else words
    if "serve" in program_of(command):
        return words[words.index("serve") + 1 :]
    return words[len(program_of(command)) :]


def _number(value: Any) -> Any:
    """A whole number as such, where it would be written the same: ``007`` is a name."""
    if isinstance(value, str) and re.fullmatch(r"0|-?[1-9][0-9]{0,17}", value):
        return int(value)
    return value


@dataclass(frozen=True)
class NoTable:
    """Why there is no table of steps by batch size; empty where none was to be expected."""

    reason: str = ""


def table_of(engine: str, arms: Mapping[int, CompareArm], flags: EngineFlags) -> tuple[str, str] | NoTable:
    """The engine's own table of steps by batch size from what is to be run at each level, or why there is none."""
    sizes = {flag_value(arm.spec.command, "--data-parallel-size", "-dp") or "1" for arm in arms.values()}
    table = steps_table(engine, {level: arm.setting for level, arm in arms.items()}, flags)
    if engine == "vllm" and sizes != {"1"} and not isinstance(table, NoTable):
        # config/vllm.py, _maybe_disable_dynamic_sd_for_data_parallel
        return NoTable("vLLM turns its table off with data parallelism")
    return table


def steps_table(engine: str, best: Mapping[int, Setting | None], flags: EngineFlags) -> tuple[str, str] | NoTable:
    """Name and text of the engine's own table of draft steps by batch size, or why there is none.

    SGLang: the JSON of ``--speculative-adaptive-config``, a batch size to its candidate steps. vLLM: what to put into
    ``--speculative-config``, the table with inclusive ranges and the most steps of them. Chains only, for more than one
    level, and not where no level speculates.
    """
    settings = [setting for setting in best.values() if setting is not None]
    most = max((setting.steps for setting in settings), default=0)
    if engine not in ("sglang", "vllm") or len(best) < 2:
        return NoTable()
    if len(settings) < len(best):
        return NoTable("at a level the engine's own choice is best, whose number is not known")
    if most == 0:
        return NoTable("speculation is off at every level")
    if any(setting.topk > 1 for setting in settings):
        return NoTable("a tree is best at a level, and the engine's table has chains only")
    steps = {level: setting.steps for level, setting in best.items() if setting is not None}
    return _sglang_table(steps, flags) if engine == "sglang" else _vllm_table(steps, flags)


def _sglang_table(steps: Mapping[int, int], flags: EngineFlags) -> tuple[str, str] | NoTable:
    if not flags.has(ADAPTIVE_FLAG):
        return NoTable(f"this version has no {ADAPTIVE_FLAG}")
    if BY_BATCH not in flags.fields:
        # 0.5.11 and 0.5.12 would read none of the batch sizes and run steps of their own.
        return NoTable(f"{ADAPTIVE_FLAG} of this version has one list of steps for all batch sizes")
    if NO_DRAFTS not in flags.fields and 0 in steps.values():
        return NoTable(f"{ADAPTIVE_FLAG} of this version has no 0 steps, which are best at a level")
    table = {str(level): {"candidate_steps": [steps[level]]} for level in sorted(steps)}
    return "speculative-adaptive.json", json.dumps(table, indent=1) + "\n"


def _vllm_table(steps: Mapping[int, int], flags: EngineFlags) -> tuple[str, str] | NoTable:
    if BATCH_FIELD not in flags.fields:
        return NoTable(f"--speculative-config of this version has no {BATCH_FIELD}")
    levels = sorted(steps)
    lows, highs = [1, *levels[1:]], [level - 1 for level in levels[1:]] + [LARGEST_BATCH]
    rows = [[low, high, steps[level]] for low, high, level in zip(lows, highs, levels, strict=True)]
    # vLLM takes no more drafts than num_speculative_tokens, whatever a row says (v1/spec_decode/dynamic/utils.py).
    table = {"num_speculative_tokens": max(steps.values()), BATCH_FIELD: rows}
    return "steps-by-batch.json", json.dumps(table) + "\n"
