"""The convention is read off an engine's source: a written tree for each form, and changed ones."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from specmeter.wiring import sglang_source, vllm_source
from specmeter.wiring.evaluate import Evaluator
from specmeter.wiring.evaluate_values import Raised, Undecided
from specmeter.wiring.feed import Feed
from specmeter.wiring.from_source import cut_block, run_block
from specmeter.wiring.held import states_of_held
from specmeter.wiring.locate import Engine
from specmeter.wiring.shape import read_shape
from specmeter.wiring.tree import Tree

IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = read_shape({"architectures": ["ToyForCausalLM"], "num_hidden_layers": 30, "hidden_size": 8}, "target")

READER = """
    class ModelRunner:
        def __init__(self, server_args):
            if self.spec_algorithm.is_eagle3():
                self.eagle_use_aux_hidden_state = True
                try:
                    eagle_config = getattr(draft_model_config.hf_config, "eagle_config", None)
                    self.eagle_use_aux_hidden_state = eagle_config.get("use_aux_hidden_state", True)
                    self.eagle_aux_hidden_state_layer_ids = eagle_config[
                        "eagle_aux_hidden_state_layer_ids"
                    ]
                except:
                    self.eagle_aux_hidden_state_layer_ids = None
            self.model.set_eagle3_layers_to_capture(self.eagle_aux_hidden_state_layer_ids)
"""
MODEL = """
    class ToyModel(nn.Module):
        def __init__(self, config):
            self.layers_to_capture = []

        def forward(self, positions, hidden_states):
            residual = None
            aux = []
            for i in range(self.start_layer, self.end_layer):
                if i in self.layers_to_capture:
                    aux.append(hidden_states + residual)
                layer = self.layers[i]
                hidden_states, residual = layer(positions, hidden_states, residual)
            return hidden_states, aux

    class ToyForCausalLM(nn.Module):
        def __init__(self, config):
            self.model = ToyModel(config)

        def set_eagle3_layers_to_capture(self, layer_ids=None):
            if not self.pp_group.is_last_rank:
                return
            if layer_ids is None:
                num_layers = self.config.num_hidden_layers
                self.model.layers_to_capture = [2, num_layers // 2, num_layers - 3]
            else:
                self.model.layers_to_capture = [val + 1 for val in layer_ids]
"""


def sglang(folder: Path, model: str = MODEL, reader: str = READER, graphs: str = "") -> Tree:
    package = folder / "sglang"
    for name, text in (
        ("srt/models/toy.py", model),
        ("srt/model_executor/model_runner.py", reader),
        ("srt/model_executor/cuda_graph_runner.py", graphs),
        ("srt/models/llama_eagle3.py", "num_aux_hidden_states norm_output"),
    ):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return Tree(package)


def fed(tree: Tree, *ids: int, config: Mapping[str, object] | None = None) -> Feed:
    draft = config if config is not None else {"eagle_config": {IDS: list(ids)}}
    (feed,) = sglang_source.derive(tree, "", TARGET, draft)
    return feed


def test_a_setter_that_adds_one(tmp_path: Path) -> None:
    feed = fed(sglang(tmp_path), 2, 15, 27)
    assert feed.states == (3, 16, 28)
    assert feed.key == ("eagle_config", IDS)
    assert [mark.path.name for mark in feed.evidence] == ["model_runner.py", "toy.py", "toy.py"]
    lines = (tmp_path / "sglang/srt/models/toy.py").read_text().splitlines()
    assert "def set_eagle3_layers_to_capture" in lines[feed.evidence[1].line - 1]
    assert "if i in self.layers_to_capture" in lines[feed.evidence[2].line - 1]


def test_a_fork_that_changes_the_setter_gives_the_changed_answer(tmp_path: Path) -> None:
    assert fed(sglang(tmp_path, MODEL.replace("val + 1", "val")), 2, 15, 27).states == (2, 15, 27)
    assert fed(sglang(tmp_path, MODEL.replace("val + 1", "val + 2")), 2, 15, 27).states == (4, 17, 29)
    changed = MODEL.replace("[val + 1 for val in layer_ids]", "list(map(lambda v: v, layer_ids))")
    assert fed(sglang(tmp_path, changed), 2, 15, 27).states is None, "a form that is not understood is not guessed"


def test_a_test_on_the_first_id(tmp_path: Path) -> None:
    model = MODEL.replace(
        "[val + 1 for val in layer_ids]", "[v + 1 for v in layer_ids] if layer_ids[0] == 1 else list(layer_ids)"
    )
    assert fed(sglang(tmp_path, model), 1, 14, 26).states == (2, 15, 27)
    assert fed(sglang(tmp_path, model), 2, 15, 27).states == (2, 15, 27)


def test_capture_after_the_layer_means_its_output(tmp_path: Path) -> None:
    test = "                if i in self.layers_to_capture:\n                    aux.append(hidden_states + residual)\n"
    call = "                hidden_states, residual = layer(positions, hidden_states, residual)\n"
    assert test in MODEL and call in MODEL
    model = MODEL.replace(test, "").replace(call, call + test)
    assert fed(sglang(tmp_path, model), 2, 15, 27).states == (4, 17, 29)
    plus = model.replace("if i in self.layers", "if i + 1 in self.layers")
    assert fed(sglang(tmp_path, plus), 2, 15, 27).states == (3, 16, 28)


def test_capture_handed_into_the_layer(tmp_path: Path) -> None:
    model = MODEL.replace(
        "                if i in self.layers_to_capture:\n                    aux.append(hidden_states + residual)\n",
        "",
    ).replace(
        "hidden_states, residual)\n", "hidden_states, residual, aux if i in self.layers_to_capture else None)\n", 1
    )
    assert fed(sglang(tmp_path, model), 2, 15, 27).states == (3, 16, 28)


def test_the_embedding_crashes_where_the_residual_is_missing(tmp_path: Path) -> None:
    feed = fed(sglang(tmp_path), -1, 15, 27)
    assert feed.states == (0, 16, 28) and "residual" in feed.refusal
    guarded = MODEL.replace(
        "hidden_states + residual)", "hidden_states if residual is None else hidden_states + residual)"
    )
    assert fed(sglang(tmp_path, guarded), -1, 15, 27).refusal == ""


def test_the_last_output_is_lost_unless_it_is_asked_for_after_the_loop(tmp_path: Path) -> None:
    feed = fed(sglang(tmp_path), 2, 15, 29)
    assert feed.states == (3, 16) and feed.lost == (30,)
    after = "            return hidden_states, aux\n"
    asked = (
        f"            if self.end_layer in self.layers_to_capture:\n                aux.append(hidden_states)\n{after}"
    )
    assert fed(sglang(tmp_path, MODEL.replace(after, asked)), 2, 15, 29).states == (3, 16, 30)


def test_graphs_captured_before_the_ids_are_set_keep_the_default(tmp_path: Path) -> None:
    graphs = """
        class CudaGraphRunner:
            def __init__(self, model_runner):
                self.model_runner.model.set_eagle3_layers_to_capture()
                self.capture()
    """
    assert fed(sglang(tmp_path, graphs=graphs), 2, 15, 27).graph_states == (2, 15, 27)
    assert fed(sglang(tmp_path, graphs=graphs), 1, 14, 26).graph_states is None
    assert fed(sglang(tmp_path), 2, 15, 27).graph_states is None


def test_no_aux_states_when_the_config_turns_them_off(tmp_path: Path) -> None:
    feed = fed(sglang(tmp_path), config={"eagle_config": {"use_aux_hidden_state": False, IDS: [1, 2, 3]}})
    assert feed.states == (30,)


def test_without_ids_the_default_of_the_model_holds(tmp_path: Path) -> None:
    feed = fed(sglang(tmp_path), config={IDS: [9, 10, 11]})
    assert feed.key is None and feed.states == (2, 15, 27)


def test_a_class_without_a_setter_and_a_missing_class_are_refusals(tmp_path: Path) -> None:
    renamed = MODEL.replace("set_eagle3_layers_to_capture", "other")
    assert "does not support EAGLE-3" in fed(sglang(tmp_path, renamed), 1, 2, 3).refusal
    assert "no model class" in fed(sglang(tmp_path, MODEL.replace("ToyForCausalLM", "Else")), 1, 2, 3).refusal


def test_a_setter_inherited_from_another_file_is_found(tmp_path: Path) -> None:
    tree = sglang(tmp_path, MODEL.replace("ToyForCausalLM", "BaseForCausalLM"))
    child = "from sglang.srt.models.toy import BaseForCausalLM\n\n\nclass ToyForCausalLM(BaseForCausalLM):\n    pass\n"
    (tree.package / "srt/models/child.py").write_text(child)
    assert fed(Tree(tree.package), 2, 15, 27).states == (3, 16, 28)


# -- vLLM


RUNNER = """
    class GPUModelRunner:
        def load(self):
            aux_layers = self._get_eagle3_aux_layers_from_config()
            if not aux_layers:
                aux_layers = self.model.get_eagle3_default_aux_hidden_state_layers()

        def _get_eagle3_aux_layers_from_config(self):
            hf_config = self.speculative_config.draft_model_config.hf_config
            layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
            if not layer_ids:
                eagle_config = getattr(hf_config, "eagle_config", None)
                if eagle_config and isinstance(eagle_config, dict):
                    layer_ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")
            if layer_ids and isinstance(layer_ids, (list, tuple)):
                return tuple(layer_ids)
            return None
"""
VLLM_MODEL = """
    class SupportsEagle3:
        def set_aux_hidden_state_layers(self, layers):
            parent = self.language_model if hasattr(self, "language_model") else self
            parent.model._set(layers)

        def get_eagle3_default_aux_hidden_state_layers(self):
            return (2, len(self.model.layers) // 2, len(self.model.layers) - 3)

    class Mixin:
        def _set(self, layers):
            self.aux_hidden_state_layers = tuple(sorted(set(layers)))

        def _keep(self, kept, index, hidden_states, residual):
            if index in self.aux_hidden_state_layers:
                kept.append(hidden_states + residual if residual is not None else hidden_states)
            return kept

    class ToyModel(Mixin):
        def forward(self, hidden_states):
            residual = None
            kept = self._keep([], 0, hidden_states, residual)
            for idx, layer in enumerate(self.layers):
                hidden_states, residual = layer(hidden_states, residual)
                self._keep(kept, idx + 1, hidden_states, residual)
            return hidden_states, kept

    class ToyForCausalLM(SupportsEagle3):
        def __init__(self):
            self.model = self._init_model()

        def _init_model(self):
            return ToyModel()
"""


def vllm(folder: Path, model: str = VLLM_MODEL) -> Tree:
    package = folder / "vllm"
    for name, text in (
        ("model_executor/models/toy.py", model),
        ("v1/worker/gpu_model_runner.py", RUNNER),
        ("model_executor/models/registry.py", '_MODELS = {\n    "ToyForCausalLM": ("toy", "ToyForCausalLM"),\n}\n'),
    ):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return Tree(package)


@pytest.mark.parametrize(
    ("config", "states", "key"),
    [
        ({}, (2, 15, 27), None),
        ({IDS: [3, 16, 28]}, (3, 16, 28), (IDS,)),
        ({IDS: [28, 3, 16, 3]}, (3, 16, 28), (IDS,)),
        ({IDS: [0, 16, 30]}, (0, 16, 30), (IDS,)),
        ({IDS: [3, 16, 28], "eagle_config": {IDS: [1, 2, 3]}}, (3, 16, 28), (IDS,)),
        ({"eagle_config": {IDS: [1, 2, 3]}}, (1, 2, 3), ("eagle_config", IDS)),
        ({IDS: []}, (2, 15, 27), None),
    ],
)
def test_vllm_takes_ids_as_states(
    config: dict[str, object], states: tuple[int, ...], key: tuple[str, ...] | None, tmp_path: Path
) -> None:
    (feed,) = vllm_source.derive(vllm(tmp_path), "", TARGET, config)
    assert (feed.states, feed.key, feed.refusal) == (states, key, "")
    assert feed.reads == ((IDS,), ("eagle_config", IDS))


def test_vllm_class_without_the_interface(tmp_path: Path) -> None:
    (feed,) = vllm_source.derive(vllm(tmp_path, VLLM_MODEL.replace("SupportsEagle3", "Other")), "", TARGET, {})
    assert "does not support EAGLE-3" in feed.refusal


# -- ids that lie in a running process: the setter has run, the loop decides


def held(name: str, tree: Tree | None, *ids: int) -> tuple[int, ...] | None:
    return states_of_held(Engine(name, "", tree), TARGET, ids)


def test_held_ids_mean_what_the_loop_makes_of_them(tmp_path: Path) -> None:
    assert held("sglang", sglang(tmp_path / "a"), 3, 16, 28) == (3, 16, 28), "the setter's +1 is not added again"
    test = "                if i in self.layers_to_capture:\n                    aux.append(hidden_states + residual)\n"
    call = "                hidden_states, residual = layer(positions, hidden_states, residual)\n"
    after = MODEL.replace(test, "").replace(call, call + test)
    assert held("sglang", sglang(tmp_path / "b", after), 3, 16, 28) == (4, 17, 29)
    assert held("vllm", vllm(tmp_path / "c"), 0, 16, 28) == (0, 16, 28)
    assert held("vllm", vllm(tmp_path / "d"), 28, 3) == (3, 28), "in the order of the layers"
    assert held("vllm", vllm(tmp_path / "e"), 3, 99) == (3,), "a layer that is not there is not captured"
    assert held("specmeter", None, 28, 3) == (28, 3), "the embedded engine keeps the order written"


def test_held_ids_of_an_unknown_form_are_not_guessed(tmp_path: Path) -> None:
    odd = MODEL.replace("if i in self.layers_to_capture", "if wanted(i, self.layers_to_capture)")
    assert held("sglang", sglang(tmp_path / "a", odd), 3, 16, 28) is None
    other = MODEL.replace("ToyForCausalLM", "OtherForCausalLM")
    assert held("sglang", sglang(tmp_path / "b", other), 3, 16, 28) is None
    assert held("vllm", None, 3, 16, 28) is None


# -- the evaluator keeps foreign code at arm's length


def test_evaluated_code_reaches_nothing_of_python(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    body = cut_block(
        tmp_path,
        f"try:\n    import os\n    os.mkdir({str(trap)!r})\n    open({str(trap)!r}, 'w')\n"
        f"    __import__('os').mkdir({str(trap)!r})\n    x = eval('1')\n    y = 'MARK'\nexcept OSError:\n    pass\n",
        "MARK",
        "try:",
    )
    assert body is not None
    assert run_block(body[0], {})["y"] == "MARK"
    assert not trap.exists()


@pytest.mark.parametrize(
    "text", ["x = [0] * 10**12", "x = list(range(10**12))", "for i in range(99999):\n for j in range(99999):\n  pass"]
)
def test_evaluated_code_cannot_exhaust_the_check(text: str) -> None:
    import ast

    try:
        Evaluator().run(ast.parse(text).body, {})
    except (Raised, Undecided):
        pass
