"""The starting point: said by the command, by the engine's source in its version, or the command as it stands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from specmeter.engines import ServerSpec, Setting
from specmeter.errors import SpecmeterError
from specmeter.tune.flags import BY_BATCH, EAGLE_DRAFT_TP, NO_DRAFTS, EngineFlags, engine_flags
from specmeter.tune.own import starting_point, stated, told
from specmeter.tune.space import AS_GIVEN_LABEL, Candidate

NONE = EngineFlags({}, "t")
EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "HEAD")
# As SGLang 0.5.9 has it (server_args.py), with fewer names.
CHOOSER = '''
def auto_choose_speculative_params(self):
    """Chosen by the model."""
    hf_config = self.get_model_config().hf_config
    arch = hf_config.architectures[0]
    if self.speculative_algorithm == "STANDALONE":
        return (3, 1, 4)
    if arch in ["LlamaForCausalLM"]:
        return (5, 4, 8)
    elif arch in ["DeepseekV3ForCausalLM"]:
        return (3, 1, 4)
    else:
        return (2, 1, 3)
'''
ARGS = "class ServerArgs:\n    model_path: str = ''\n    tp_size: int = 1\n    speculative_num_steps: int = 0\n"


def _sglang(*words: str) -> ServerSpec:
    return ServerSpec("sglang", ("python", "-m", "sglang.launch_server", "--model-path", "M", *words))


def _steps(text: str) -> tuple[str, ...]:
    steps, topk, tokens = text.split()
    return (
        "--speculative-num-steps", steps, "--speculative-eagle-topk", topk, "--speculative-num-draft-tokens", tokens,
    )  # fmt: skip


def _package(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(root).parents:
            (root / folder / "__init__.py").touch()


def _installed(root: Path, architecture: str | None, files: dict[str, str], *words: str) -> EngineFlags:
    _package(root / "lib", files)
    (root / "model").mkdir()
    if architecture is not None:
        (root / "model" / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    command = (sys.executable, "-c", "print('no help here')", "--model-path", str(root / "model"), *words)
    return engine_flags(ServerSpec("sglang", command, {"PYTHONPATH": str(root / "lib")}))


@pytest.mark.parametrize(
    ("architecture", "words", "choice"),
    [
        ("LlamaForCausalLM", EAGLE3, (5, 4, 8)),
        ("DeepseekV3ForCausalLM", EAGLE3, (3, 1, 4)),
        ("OtherForCausalLM", EAGLE3, (2, 1, 3)),
        ("LlamaForCausalLM", ("--speculative-algorithm", "STANDALONE"), (3, 1, 4)),
        ("LlamaForCausalLM", ("--speculative-algorithm", "NGRAM"), None),  # SGLang asks this of the EAGLE family only
        ("LlamaForCausalLM", (*EAGLE3, "--json-model-override-args", "{}"), None),
        (None, EAGLE3, None),
    ],
)
@pytest.mark.parametrize("module", ["server_args", "arg_groups/speculative_hook"])
def test_sglangs_own_choice_is_read_from_its_source(
    tmp_path: Path, module: str, architecture: str | None, words: tuple[str, ...], choice: tuple[int, int, int] | None
) -> None:
    files = {"sglang/srt/server_args.py": ARGS}
    path = f"sglang/srt/{module}.py"
    text = CHOOSER.replace("def auto", "def _auto") if "hook" in module else CHOOSER
    files[path] = files.get(path, "") + text
    flags = _installed(tmp_path, architecture, files, *words)
    assert flags.own_choice == choice
    start = starting_point(_sglang(*words), flags)
    assert start == Candidate(Setting.of(*choice)) if choice else start.own and start.label == AS_GIVEN_LABEL


def test_a_chooser_of_another_form_is_not_guessed_at(tmp_path: Path) -> None:
    other = CHOOSER.replace('arch in ["LlamaForCausalLM"]', "is_llama(self)")
    files = {"sglang/srt/server_args.py": ARGS + other}
    assert _installed(tmp_path, "LlamaForCausalLM", files, *EAGLE3).own_choice is None


def test_the_model_is_found_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    _package(tmp_path / "lib", {"sglang/srt/server_args.py": ARGS + CHOOSER})
    command = (sys.executable, "-c", "print('no help here')", "--model-path", "org/name", *EAGLE3)
    env = {"PYTHONPATH": str(tmp_path / "lib"), "HF_HOME": str(tmp_path), "HF_HUB_CACHE": ""}
    assert engine_flags(ServerSpec("sglang", command, env)).own_choice == (5, 4, 8)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def load(path):\n    return {}\n", set()),
        ("def load(cfg):\n    for key in cfg:\n        if not key.isdigit():\n            pass\n", {BY_BATCH}),
        (
            "def load(cfg):\n    ok = [k.isdigit() for k in cfg]\n    return all(s >= 0 for s in cfg)\n",
            {BY_BATCH, NO_DRAFTS},
        ),
    ],
)
def test_what_the_adaptive_configuration_takes_is_read_from_the_source(
    tmp_path: Path, body: str, words: set[str]
) -> None:
    files = {"sglang/srt/server_args.py": ARGS, "sglang/srt/speculative/adaptive_spec_params.py": body}
    assert _installed(tmp_path, None, files, *EAGLE3).fields == words


@pytest.mark.parametrize(("body", "reads"), [("x = 1\n", False), ("tp = config.draft_parallel_config.size\n", True)])
def test_whether_vllms_eagle_draft_reads_a_tensor_parallel_size(tmp_path: Path, body: str, reads: bool) -> None:
    config = "class SpeculativeConfig:\n    draft_tensor_parallel_size: int = 1\n"
    files = {
        "vllm/config/speculative.py": config,
        "vllm/engine/arg_utils.py": "class EngineArgs:\n    a: int = 1\n    b: int = 1\n    c: int = 1\n",
        "vllm/v1/spec_decode/eagle.py": body,
    }
    _package(tmp_path, files)
    command = (sys.executable, "-c", "print('no help here')")
    flags = engine_flags(ServerSpec("vllm", command, {"PYTHONPATH": str(tmp_path)}))
    assert (EAGLE_DRAFT_TP in flags.fields) == reads and "draft_tensor_parallel_size" in flags.fields


@pytest.mark.parametrize(
    ("spec", "setting"),
    [
        (_sglang(), Setting.of(0)),
        (_sglang(*EAGLE3), None),
        (_sglang(*EAGLE3, *_steps("3 1 8")), Setting.of(3)),  # SGLang makes 4 of the 8 itself
        (_sglang(*EAGLE3, *_steps("5 4 8")), Setting.of(5, 4, 8)),
        (ServerSpec("embedded", ("specmeter", "serve")), Setting.of(2)),
        (ServerSpec("embedded", ("specmeter", "serve", "--draft", "none")), Setting.of(0)),
        (ServerSpec("embedded", ("specmeter", "serve", "--speculative-num-steps", "4")), Setting.of(4)),
        (ServerSpec("vllm", ("vllm", "serve", "M")), Setting.of(0)),
        (ServerSpec("vllm", ("vllm", "serve", "M", "--speculative-config", '{"method": "mtp"}')), None),
    ],
)
def test_what_the_command_says(spec: ServerSpec, setting: Setting | None) -> None:
    assert stated(spec) == setting
    assert starting_point(spec, NONE).own == (setting is None)


def test_numbers_that_no_server_runs_are_said_before_a_start() -> None:
    with pytest.raises(SpecmeterError, match="no setting to start from"):
        stated(_sglang(*EAGLE3, *_steps("2 4 99")))


def test_an_engine_that_changes_its_steps_by_itself_starts_as_it_is_and_is_fixed_for_the_others() -> None:
    words = ("--speculative-adaptive", "--speculative-adaptive-config", "a.json")
    sglang = _sglang(*EAGLE3, *_steps("3 1 4"), *words)
    table = {"method": "eagle3", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 9, 2]]}
    vllm = ServerSpec("vllm", ("vllm", "serve", "M", "--speculative-config", json.dumps(table)))
    for spec in (sglang, vllm):
        start = starting_point(spec, EngineFlags({}, "t", fields=frozenset({"choice=5,4,8"})))
        assert start.own and start.arm(spec).spec == spec
        for k in (0, 2):
            command = " ".join(Candidate(Setting.of(k)).arm(spec).spec.command)
            assert "adaptive" not in command and "per_batch_size" not in command
    assert '"num_speculative_tokens": 2' in " ".join(Candidate(Setting.of(2)).arm(vllm).spec.command)


def test_what_the_server_tells_of_its_own_choice() -> None:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    assert told(dict(zip(names, ("5", "4", "8"), strict=True))) == "k=5 top-k=4 tokens=8"
    assert told(dict(zip(names, ("3", "1", "4"), strict=True))) == "k=3" and told({}) == ""
    assert told({"speculative_config": "SpeculativeConfig(method='mtp', model='M', num_spec_tokens=3)"}) == "k=3"
    assert told({names[0]: "5", names[1]: "0"}) == ""
