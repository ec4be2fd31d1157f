"""What a tune leaves for use: a server file, a command to run, the engine's own configuration, steps by batch size."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specmeter.bench.arms import CompareArm
from specmeter.engines import Setting
from specmeter.engines.flags import Command
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.whole import NotSaved
from specmeter.tune.flags import EngineFlags, program_of

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


def write_outcome(
    folder: Path, arm: CompareArm, engine: str, steps: Mapping[int, Setting], flags: EngineFlags
) -> list[str]:
    """Write the files (0600) into ``folder``; returns their names.

    ``steps`` is the best setting by concurrency level; more than one level gives the engine's table of steps by batch
    size where this version has one. Secrets are masked, as in everything that is stored. Raises NotSaved.
    """
    command, env = tuple(mask_command(arm.spec.command)), mask_env(arm.spec.env)
    files = {
        "tuned.toml": server_table(engine, command, env),
        "tuned.sh": f"#!/bin/sh\n{command_line(command, env)}\n",
    }
    if engine in ("sglang", "vllm"):
        files["engine-config.yaml"] = engine_config(command)
    table = steps_table(engine, steps, flags)
    if table is not None:
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


def server_table(engine: str, command: Sequence[str], env: Mapping[str, str]) -> str:
    """A ``[server.tuned]`` for ``--server FILE``. JSON strings are TOML basic strings."""
    words = ", ".join(json.dumps(word) for word in command)
    pairs = ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in sorted(env.items()))
    return f'[server.tuned]\nengine = "{engine}"\ncommand = [{words}]\nenv = {{ {pairs} }}\n'


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


def steps_table(engine: str, best: Mapping[int, Setting], flags: EngineFlags) -> tuple[str, str] | None:
    """Name and text of the engine's own table of draft steps by batch size; None for one level or without such a table.

    SGLang: the JSON of ``--speculative-adaptive-config``, a batch size to its candidate steps. vLLM: what to put into
    ``--speculative-config``, the table with inclusive ranges and the most steps of them. Chains only, and nothing where
    no level speculates.
    """
    most = max((setting.steps for setting in best.values()), default=0)
    if len(best) < 2 or most == 0 or any(setting.topk > 1 for setting in best.values()):
        return None
    levels = sorted(best)
    if engine == "sglang" and flags.has(ADAPTIVE_FLAG):
        table = {str(level): {"candidate_steps": [best[level].steps]} for level in levels}
        return "speculative-adaptive.json", json.dumps(table, indent=1) + "\n"
    if engine == "vllm" and BATCH_FIELD in flags.fields:
        lows, highs = [1, *levels[1:]], [level - 1 for level in levels[1:]] + [LARGEST_BATCH]
        rows = [[low, high, best[level].steps] for low, high, level in zip(lows, highs, levels, strict=True)]
        # vLLM takes no more drafts than num_speculative_tokens, whatever a row says (v1/spec_decode/dynamic/utils.py).
        return "steps-by-batch.json", json.dumps({"num_speculative_tokens": most, BATCH_FIELD: rows}) + "\n"
    return None
