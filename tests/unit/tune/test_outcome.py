"""What a tune leaves: files that start the tuned server."""

from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path

from specmeter.bench.arms import CompareArm
from specmeter.engines import ServerSpec, Setting
from specmeter.engines.spec import read_server_file
from specmeter.tune.flags import EngineFlags
from specmeter.tune.outcome import command_line, engine_config, steps_table, write_outcome

COMMAND = ("vllm", "serve", "my model", "--speculative-config", '{"num_speculative_tokens": 2}', "--enforce-eager")
NEW = EngineFlags(
    {"--speculative-adaptive-config": ()}, "t", fields=frozenset({"num_speculative_tokens_per_batch_size"})
)
OLD = EngineFlags({}, "t")


def test_the_server_file_reads_back_as_the_same_command(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", COMMAND, {"A": 'x "y" $z'})
    names = write_outcome(tmp_path, CompareArm("tuned", spec), "vllm", {1: Setting.of(2)}, OLD)
    assert names == ["engine-config.yaml", "tuned.sh", "tuned.toml"]
    again = read_server_file(str(tmp_path / "tuned.toml"))
    assert (again.command, dict(again.env), again.engine) == (COMMAND, dict(spec.env), "vllm")
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in names)


def test_the_command_line_is_quoted() -> None:
    assert shlex.split(command_line(COMMAND, {"A": "b c"})) == ["A=b c", *COMMAND]


def test_secrets_are_masked(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", (*COMMAND, "--api-key", "hunter2"), {"HF_TOKEN": "hunter3"})
    write_outcome(tmp_path, CompareArm("tuned", spec), "vllm", {}, OLD)
    assert not any("hunter" in path.read_text() for path in tmp_path.iterdir())


def test_engine_config_is_json_valued_yaml() -> None:
    lines = dict(line.split(": ", 1) for line in engine_config((*COMMAND, "--sizes", "1", "2", "--tp=4")).splitlines())
    assert json.loads(lines["enforce-eager"]) is True and json.loads(lines["sizes"]) == ["1", "2"]
    assert json.loads(lines["tp"]) == 4 and json.loads(json.loads(lines["speculative-config"])) == {
        "num_speculative_tokens": 2
    }


def test_engine_config_keeps_the_model_short_flags_and_names_of_digits() -> None:
    command = ("vllm", "serve", "M", "-tp", "2", "--revision", "0012", "--seed", "-1", "--async", "-x", "3", "--port=7")
    lines = engine_config(command).splitlines()
    assert lines[:4] == ['model: "M"', "tensor-parallel-size: 2", 'revision: "0012"', "seed: -1"]
    assert lines[4:] == ["async: true", "# not in this file, give it on the command line: -x 3", "port: 7"]
    module = ("python", "-u", "-m", "sglang.launch_server", "--model-path", "M")
    assert engine_config(module) == 'model-path: "M"\n'


def test_steps_by_batch_size_in_each_engines_own_form() -> None:
    best = {1: Setting.of(4), 8: Setting.of(2), 32: Setting.of(0)}
    name, text = steps_table("sglang", best, NEW) or ("", "")
    assert name == "speculative-adaptive.json" and json.loads(text)["8"] == {"candidate_steps": [2]}
    _, text = steps_table("vllm", best, NEW) or ("", "")
    rows = [[1, 7, 4], [8, 31, 2], [32, 65536, 0]]
    # vLLM caps every row at num_speculative_tokens, so that has to be the most of them.
    assert json.loads(text) == {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": rows}
    assert steps_table("vllm", {1: Setting.of(0), 8: Setting.of(0)}, NEW) is None
    assert steps_table("vllm", best, OLD) is None and steps_table("sglang", best, OLD) is None
    assert steps_table("sglang", {1: Setting.of(2)}, NEW) is None
    assert steps_table("sglang", {1: Setting.of(2), 4: Setting.of(2, 4, 8)}, NEW) is None
