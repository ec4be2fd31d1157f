"""What a tune leaves: files that start the tuned server."""

from __future__ import annotations

import json
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from specmeter.bench.arms import CompareArm
from specmeter.engines import ServerSpec, Setting
from specmeter.engines.spec import read_server_file
from specmeter.tune.flags import BY_BATCH, NO_DRAFTS, EngineFlags
from specmeter.tune.outcome import NoTable, command_line, engine_config, steps_table, table_of, write_outcome

COMMAND = ("vllm", "serve", "my model", "--speculative-config", '{"num_speculative_tokens": 2}', "--enforce-eager")
NEW = EngineFlags(
    {"--speculative-adaptive-config": (), "--config": ()},
    "t",
    fields=frozenset({"num_speculative_tokens_per_batch_size", BY_BATCH, NO_DRAFTS}),
)
OLD = EngineFlags({"--config": ()}, "t")


def test_the_server_file_reads_back_as_the_same_command(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", COMMAND, {"A": 'x "y" $z'})
    names = write_outcome(tmp_path, {1: CompareArm("tuned", spec)}, "vllm", OLD)
    assert names == ["engine-config.yaml", "tuned.sh", "tuned.toml"]
    again = read_server_file(str(tmp_path / "tuned.toml"))
    assert (again.command, dict(again.env), again.engine) == (COMMAND, dict(spec.env), "vllm")
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in names)


def test_each_level_has_files_of_its_own(tmp_path: Path) -> None:
    arms = {
        level: CompareArm("tuned", ServerSpec("vllm", (*COMMAND, "--seed", str(level))), Setting.of(level))
        for level in (1, 4)
    }
    names = write_outcome(tmp_path, arms, "vllm", NEW)
    each = [f"{name}-{level}.{end}" for name, end in (("engine-config", "yaml"), ("tuned", "sh"), ("tuned", "toml"))
            for level in (1, 4)]  # fmt: skip
    assert sorted(names) == sorted([*each, "steps-by-batch.json"])
    for level, arm in arms.items():
        assert read_server_file(str(tmp_path / f"tuned-{level}.toml")).command == arm.spec.command
        assert f"--seed {level}" in (tmp_path / f"tuned-{level}.sh").read_text()
    assert json.loads((tmp_path / "steps-by-batch.json").read_text())["num_speculative_tokens"] == 4


def test_a_version_without_the_flag_for_it_gets_no_configuration_file(tmp_path: Path) -> None:
    arm = CompareArm("tuned", ServerSpec("sglang", COMMAND))
    assert write_outcome(tmp_path, {1: arm}, "sglang", EngineFlags({}, "t")) == ["tuned.sh", "tuned.toml"]


def test_vllms_table_is_not_written_with_data_parallelism() -> None:
    def arms(*words: str) -> dict[int, CompareArm]:
        spec = ServerSpec("vllm", (*COMMAND, *words))
        return {level: CompareArm("tuned", spec, Setting.of(k)) for level, k in ((1, 4), (8, 2))}

    found = table_of("vllm", arms("-dp", "2"), NEW)
    assert isinstance(found, NoTable) and "data parallelism" in found.reason
    for words in ((), ("--data-parallel-size", "1")):
        assert not isinstance(table_of("vllm", arms(*words), NEW), NoTable)


def test_the_command_line_is_quoted() -> None:
    assert shlex.split(command_line(COMMAND, {"A": "b c"})) == ["A=b c", *COMMAND]


def test_secrets_are_masked(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", (*COMMAND, "--api-key", "hunter2"), {"HF_TOKEN": "hunter3"})
    write_outcome(tmp_path, {1: CompareArm("tuned", spec)}, "vllm", OLD)
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


def _table(engine: str, best: Mapping[int, Setting | None], flags: EngineFlags) -> tuple[str, str]:
    found = steps_table(engine, best, flags)
    assert not isinstance(found, NoTable), found
    return found


def test_steps_by_batch_size_in_each_engines_own_form() -> None:
    best = {1: Setting.of(4), 8: Setting.of(2), 32: Setting.of(0)}
    name, text = _table("sglang", best, NEW)
    assert name == "speculative-adaptive.json"
    assert json.loads(text) == {str(level): {"candidate_steps": [s.steps]} for level, s in best.items()}
    _, text = _table("vllm", best, NEW)
    rows = [[1, 7, 4], [8, 31, 2], [32, 65536, 0]]
    # vLLM caps every row at num_speculative_tokens, so that has to be the most of them.
    assert json.loads(text) == {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": rows}


def _version(*fields: str) -> EngineFlags:
    return EngineFlags({"--speculative-adaptive-config": ()}, "t", fields=frozenset(fields))


@pytest.mark.parametrize(
    ("engine", "best", "flags", "why"),
    [
        ("vllm", {1: 0, 8: 0}, NEW, "off at every level"),
        ("vllm", {1: 4, 8: 2}, OLD, "has no num_speculative_tokens_per_batch_size"),
        ("sglang", {1: 4, 8: 2}, OLD, "has no --speculative-adaptive-config"),
        ("sglang", {1: 4, 8: 2}, _version(), "one list of steps for all batch sizes"),  # 0.5.11, 0.5.12
        ("sglang", {1: 4, 8: 0}, _version(BY_BATCH), "has no 0 steps"),  # 0.5.13
        ("sglang", {1: 4, 8: None}, NEW, "engine's own choice"),
        ("sglang", {1: 4}, NEW, ""),
        ("embedded", {1: 4, 8: 2}, NEW, ""),
    ],
)
def test_where_there_is_no_table_the_reason_is_told(
    engine: str, best: dict[int, int | None], flags: EngineFlags, why: str
) -> None:
    found = steps_table(engine, {at: None if k is None else Setting.of(k) for at, k in best.items()}, flags)
    assert isinstance(found, NoTable) and why in found.reason and bool(why) == bool(found.reason)


def test_trees_have_no_table() -> None:
    found = steps_table("sglang", {1: Setting.of(2), 4: Setting.of(2, 4, 8)}, NEW)
    assert isinstance(found, NoTable) and "tree" in found.reason
    assert _table("sglang", {1: Setting.of(4), 8: Setting.of(2)}, _version(BY_BATCH))
