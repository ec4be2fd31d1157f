"""``check --link`` over two ranks: the real recipe's wiring point, runtime and command on a small SGLang-shaped server.

SGLang with tensor parallelism needs GPUs, so its classes are written small here; everything of specmeter is real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from specmeter.control import Link, launch_env, processes
from specmeter.control.prepare import prepare_link
from specmeter.recipes.loader import built_in
from tests.support.children import running, until
from tests.support.recipes import cycle, recipe, runner
from tests.support.wiring_pairs import make

IDS = "eagle_aux_hidden_state_layer_ids"
HIDDEN, HEADS, VOCAB = 4096, 32, 1000
HEADER = recipe(
    runner("v1"),
    cycle("sglang.srt.speculative.eagle_worker", "EAGLEWorker.forward_batch_generation"),
    engine="sglang",
)
WORKER = """
class Thing:
    def __init__(self, **fields):
        self.__dict__.update(fields)

class EAGLEWorker:
    def __init__(self, captured, ranks, heads, rows):
        inner = Thing(layers_to_capture=captured, layers=[None] * 32)
        self.target_worker = Thing(model_runner=Thing(model=Thing(model=inner)))
        qkv = Thing(weight=Thing(shape=(3072, 8192)))
        attention = Thing(num_heads=heads // ranks, total_num_heads=heads, qkv_proj=qkv)
        fc = Thing(weight=Thing(shape=(4096, 3 * 4096)), in_features=3 * 4096)
        draft = Thing(model=Thing(midlayer=Thing(self_attn=attention), fc=fc), hot_token_id=Thing(shape=(1000,)))
        draft.lm_head = Thing(weight=Thing(shape=(rows, 4096)))
        self.draft_model_runner = Thing(model=draft)
        self.server_args = Thing(tp_size=2, speculative_num_steps=3, speculative_eagle_topk=None)

    def forward_target_extend(self, batch):
        return batch

    def forward_batch_generation(self, batch):
        return self.forward_target_extend(batch)
"""
MODEL = """
class LlamaModel(nn.Module):
    def __init__(self, config):
        self.layers_to_capture = []

    def forward(self, positions, hidden_states):
        residual, aux = None, []
        for i in range(len(self.layers)):
            if i in self.layers_to_capture:
                aux.append(hidden_states + residual)
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, residual)
        return hidden_states, aux

class LlamaForCausalLM(nn.Module):
    def __init__(self, config):
        self.model = LlamaModel(config)

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if layer_ids is None:
            num_layers = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, num_layers // 2, num_layers - 3]
        else:
            self.model.layers_to_capture = [val + 1 for val in layer_ids]
"""
READER = """
class ModelRunner:
    def load(self):
        self.eagle_use_aux_hidden_state = True
        try:
            eagle_config = getattr(draft_model_config.hf_config, "eagle_config", None)
            self.eagle_aux_hidden_state_layer_ids = eagle_config["eagle_aux_hidden_state_layer_ids"]
        except:
            self.eagle_aux_hidden_state_layer_ids = None
        self.model.set_eagle3_layers_to_capture(self.eagle_aux_hidden_state_layer_ids)
"""
SERVE = """
import time
from sglang.srt.speculative.eagle_worker import EAGLEWorker
worker = EAGLEWorker({captured}, {ranks}, {heads}, {rows})
while True:
    worker.forward_batch_generation(None)
    time.sleep(0.02)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the small engine, the recipe, and a pair whose nested ids mean the states 3, 16, 28."""
    for name, text in (
        ("srt/speculative/eagle_worker.py", WORKER),
        ("srt/models/llama.py", MODEL),
        ("srt/model_executor/model_runner.py", READER),
        ("srt/models/llama_eagle3.py", "# num_aux_hidden_states"),
    ):
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for folder in ("sglang", "sglang/srt", "sglang/srt/speculative"):
        (tmp_path / folder / "__init__.py").write_text("")
    points = built_in("sglang").path.read_text().split("[[point]]")
    wiring = next(text for text in points if 'name = "wiring"' in text and 'runner = "v1"' in text)
    (tmp_path / "wiring.toml").write_text(f"{HEADER}\n[[point]]{wiring}")
    made = make("llama", VOCAB)
    made.draft["eagle_config"] = {IDS: [2, 15, 27]}
    made.write(tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "specmeter").mkdir(mode=0o700)
    return tmp_path


@contextmanager
def ranks(place: Path, *captured: list[int], over: int = 2, heads: int = HEADS, rows: int = 512) -> Iterator[Link]:
    """One process a rank under one link, each holding its ids; the draft is divided over ``over`` of them."""
    env = {**os.environ, "PYTHONPATH": str(place), "XDG_RUNTIME_DIR": str(place / "run")}
    link = prepare_link(
        (sys.executable,), engine="sglang", recipe=place / "wiring.toml", base=place / "run" / "specmeter", env=env
    )
    with ExitStack() as stack:
        for rank, ids in enumerate(captured):
            its = {**launch_env(link, env), "RANK": str(rank), "WORLD_SIZE": str(len(captured))}
            stack.enter_context(running(SERVE.format(captured=ids, ranks=over, heads=heads, rows=rows), its))
        until(lambda: len(list(link.path.glob("*-*.json"))) == len(captured), "all ranks to come up")
        yield link


def check(place: Path, link: Link, *more: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Exit code, the live part (or the error), and the findings' severities by id."""
    words = ["check", "--target", str(place / "target"), "--draft", str(place / "draft"), "--link", link.id, "--json"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(place / "run"), "PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-m", "specmeter", *words, *more], capture_output=True, text=True, timeout=120, env=env
    )
    document = json.loads(done.stdout)
    if "error" in document:
        return done.returncode, document["error"], {}
    found = {finding["id"]: finding["severity"] for finding in document["result"]["findings"]}
    return done.returncode, document["result"]["live"], found


def test_two_sound_ranks(place: Path) -> None:
    with ranks(place, [3, 16, 28], [3, 16, 28]) as link:
        code, live, found = check(place, link, "--trained", "3,16,28", "--tp", "2")
    assert code == 0, found
    assert [(one["rank"], one["world"], one["states"]) for one in live["processes"]] == [
        (0, 2, [3, 16, 28]),
        (1, 2, [3, 16, 28]),
    ]
    assert {one["draft_sharded_over"] for one in live["processes"]} == {2}
    first = live["processes"][0]
    assert first["values"]["lm_head"] == [512, HIDDEN] and first["values"]["fc_inputs"] == [3 * HIDDEN]
    assert "AttributeError" in first["unread"]["captured_2"]
    assert "NotAPlainValue" in first["unread"]["draft_topk"]
    assert found["live"] == found["live-sharded"] == "note"


@pytest.mark.parametrize(
    ("held", "settings", "more", "expected"),
    [
        ([[2, 15, 27]] * 2, {}, [], {"live-differs", "live-shift"}),
        ([[0, 16, 28]] * 2, {}, [], {"live-differs", "live-embedding-fed"}),
        ([[3, 16, 28], [2, 15, 27]], {}, [], {"live-ranks-differ", "live-differs", "live-shift"}),
        ([[]] * 2, {}, [], {"live-differs", "live-shift"}),
        ([[3, 8, 16, 28]] * 2, {}, [], {"live-differs", "live-shift", "live-fc-width"}),
        ([[3, 16, 28]] * 2, {"over": 2}, ["--draft-tp", "1", "--tp", "2"], {"live-draft-tp"}),
        ([[3, 16, 28]] * 2, {"heads": 16}, [], {"live-shape"}),
        ([[3, 16, 28]] * 2, {"rows": 4096}, [], {"live-shape"}),
        ([[3, 16, 28]] * 2, {}, ["--steps", "5"], set()),
    ],
)
def test_what_ranks_hold_wrongly_is_named(
    held: list[list[int]], settings: dict[str, int], more: list[str], expected: set[str], place: Path
) -> None:
    with ranks(place, *held, **settings) as link:
        code, live, found = check(place, link, "--trained", "3,16,28", *more)
    named = {id for id, severity in found.items() if severity == "error" and id.startswith("live")}
    assert named == expected, live
    assert code == int(bool(expected))
    assert ("live-settings" in found) == ("--steps" in more)


def test_a_link_without_the_point_is_refused(place: Path) -> None:
    (place / "wiring.toml").write_text(HEADER)
    with ranks(place, [3, 16, 28]) as link:
        code, error, _ = check(place, link)
    assert code == 3 and "has no wiring point in its plan" in error["what"]


def test_a_server_that_does_not_answer_is_said_and_left_dormant(place: Path) -> None:
    with ranks(place, [3, 16, 28]) as link:
        code, error, _ = check(place, link, "--url", "http://127.0.0.1:9")
        assert code == 4 and "did not answer a request" in error["what"]
        assert not [process for process in processes(link) if process.armed]


def test_a_server_that_ends_meanwhile_is_said(place: Path) -> None:
    serve = "import time; import sglang.srt.speculative.eagle_worker; time.sleep(600)"
    env = {**os.environ, "PYTHONPATH": str(place), "XDG_RUNTIME_DIR": str(place / "run")}
    link = prepare_link(
        (sys.executable,), engine="sglang", recipe=place / "wiring.toml", base=place / "run" / "specmeter", env=env
    )
    with running(serve, launch_env(link, env)) as server, ThreadPoolExecutor(1) as pool:
        until(lambda: list(link.path.glob("*-*.json")), "the process to come up")
        checking = pool.submit(check, place, link, "--wait", "50")
        until(lambda: any(process.armed for process in processes(link)), "the check to wait for a request")
        server.kill()
        code, error, _ = checking.result()
    assert code == 4 and "has ended" in error["what"]
