"""What a user can get wrong with models, heads and settings, each refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specmeter.eagle.config import DraftConfig, LlamaConfig
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.errors import SpecmeterError
from tests.support.tiny_eagle import write_head, write_target


@pytest.mark.parametrize(
    "arguments",
    [(-1,), (17,), (2, 0), (2, 17), (2, 1, 4), (2, 1, 1), (2, 2, 8), (0, 1, 5), (True,), (1.5,), (3, 4, 65)],
)
def test_settings_out_of_range(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(SpecmeterError):
        SpecSettings(*arguments)


def test_draft_tokens_count_the_root() -> None:
    assert SpecSettings(3).draft_tokens == 4
    assert SpecSettings(3, 2).draft_tokens == 1 + 2 + 4 + 4
    assert SpecSettings(8, 8).draft_tokens == 64
    assert SpecSettings(0, 1, 1).speculative_num_steps == 0


@pytest.mark.parametrize("values", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_tokens": 0}])
def test_sampling_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(SpecmeterError):
        Sampling(**values)  # type: ignore[arg-type]


def test_directories_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match="not a model directory"):
        LlamaConfig.from_dir(tmp_path / "absent")
    with pytest.raises(SpecmeterError, match="not a model directory"):
        LlamaConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecmeterError, match="not sound JSON"):
        LlamaConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SpecmeterError, match="gpt2"):
        LlamaConfig.from_dir(tmp_path)


def test_models_without_or_with_broken_weights(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SpecmeterError, match="not a sound safetensors file"):
        Engine.load(target, None)
    weights.unlink()
    with pytest.raises(SpecmeterError, match="no weights"):
        Engine.load(target, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 30}, "vocabulary has 30"),
        ({"hidden_size": 64}, "hidden size is 64"),
        ({"specmeter_capture": [0, 1]}, "fc.weight"),
        ({"specmeter_capture": [0, 1, 4]}, "states [0, 1, 4]"),
        ({"specmeter_capture": None}, "does not say which target states"),
        ({"draft_vocab_size": 8}, "lm_head.weight"),
        ({"draft_vocab_size": 99}, "more than the target"),
        ({"num_attention_heads": 3}, "not a multiple"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "a"}}, "low_freq_factor is None"),
        ({"rope_theta": "a"}, "rope_theta is 'a'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps is 'a'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"specmeter_capture": [True, False, True]}, "[True, False, True], not a list"),
        ({"specmeter_capture": [1, 1, 3]}, "[1, 1, 3] names a state twice"),
        ({"eagle_config": [1], "specmeter_capture": "x"}, "is 'x', not a list"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
    ],
)
def test_heads_that_do_not_fit(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SpecmeterError) as caught:
        Engine.load(target, head)
    assert said in str(caught.value) and caught.value.why and caught.value.next_step


def test_deeply_nested_config(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    (head / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(SpecmeterError, match="not sound JSON") as caught:
        DraftConfig.from_dir(head)
    assert "nested too deeply" in caught.value.why


def rewrite_header(weights: Path, change: Callable[[str], str]) -> None:
    """The same data under a changed header."""
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + size].decode()).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")
    weights = head / "model.safetensors"
    (head / "second.safetensors").write_bytes(weights.read_bytes())
    with pytest.raises(SpecmeterError, match="two checkpoints"):
        Engine.load(target, head)
    (head / "second.safetensors").unlink()
    rewrite_header(weights, lambda header: header.replace('"norm.weight"', '"fc.weight"'))
    with pytest.raises(SpecmeterError, match="not sound JSON") as caught:
        Engine.load(target, head)
    assert "'fc.weight' occurs twice" in caught.value.why


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    shutil.copy(target / "model.safetensors", target / "old.safetensors")
    names = {"model.norm.weight": "model.safetensors"}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert Engine.load(target, None, threads=1, max_context=20).max_context == 20


def test_a_map_of_fractions(tmp_path: Path) -> None:
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"].double()}, head / "model.safetensors")
    with pytest.raises(SpecmeterError, match=r"d2t in .* has dtype float64"):
        Engine.load(target, head)
    save_file(tensors | {"norm.weight": tensors["norm.weight"].long()}, head / "model.safetensors")
    with pytest.raises(SpecmeterError, match=r"norm\.weight in .* has dtype int64"):
        Engine.load(target, head)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")
    (head / name).unlink()
    os.mkfifo(head / name)
    with pytest.raises(SpecmeterError, match="not a regular file"):
        Engine.load(target, head)


def test_requests_that_cannot_be_served(tmp_path: Path) -> None:
    engine = Engine.load(write_target(tmp_path / "target"), None, max_context=20)
    with pytest.raises(SpecmeterError, match="empty"):
        engine.generate([], Sampling())
    with pytest.raises(SpecmeterError, match="20 tokens"):
        engine.generate([1] * 20, Sampling())
    with pytest.raises(SpecmeterError, match="unknown token"):
        engine.generate([24], Sampling())
    with pytest.raises(SpecmeterError, match="no draft head"):
        engine.generate([1], Sampling(), SpecSettings(2))
    with pytest.raises(SpecmeterError, match="dtype"):
        Engine.load(tmp_path / "target", None, dtype="int8")


def test_topk_beyond_the_draft_vocabulary(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", draft_vocab=3)
    engine = Engine.load(write_target(tmp_path / "target"), head, max_context=20)
    with pytest.raises(SpecmeterError, match="topk is 4"):
        engine.generate([1], Sampling(), SpecSettings(2, 4))


def test_packaged_head_states_its_ids_for_each_engine() -> None:
    import specmeter.eagle

    head = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"
    assert DraftConfig.from_dir(head).capture == (3, 16, 29)
    config = json.loads((head / "config.json").read_text())
    # Keys that another engine would read, and read as other states, must not be there.
    assert not {"eagle_config", "eagle_aux_hidden_state_layer_ids"} & config.keys()
