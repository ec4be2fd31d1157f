"""The numeric check on the real model: what it predicts is what the embedded engine then accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specmeter.eagle.config import DraftConfig
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.model_store import ensure_model
from specmeter.eagle.tokenizer import Tokenizer
from specmeter.wiring.measure import SoftLoss, acceptance, fuse, in_errors
from specmeter.wiring.numeric import Bench, Unroller, load, prepare, write_text
from specmeter.wiring.probe import Wiring, probe_findings, run_probe
from specmeter.wiring.scan import run_scan

pytestmark = pytest.mark.engine

HEADS = Path(__file__).parents[2] / "src" / "specmeter" / "eagle" / "heads"
PROMPTS = ("Explain why the sky is blue.", "Give me five tips for a good night's sleep.", "What is a virus?")


@pytest.fixture(scope="module")
def head() -> Path:
    return sorted(HEADS.glob("smollm2-135m*"))[0]


@pytest.fixture(scope="module")
def bench(head: Path) -> Bench:
    before = torch.get_num_threads()
    target, draft = load(ensure_model(), head, 3, threads=1)
    torch.set_num_threads(before)
    return prepare(target, draft, write_text(target, Tokenizer(ensure_model()), PROMPTS, 48))


@pytest.fixture(scope="module")
def trained(head: Path) -> tuple[int, ...]:
    return DraftConfig.from_dir(head).capture


def test_the_predicted_accept_length_is_the_engine_s_own(bench: Bench, head: Path, trained: tuple[int, ...]) -> None:
    predicted = acceptance(Unroller(bench, 3), fuse(bench, trained)).accept_length()
    engine, tokenizer = Engine.load(ensure_model(), head, max_context=512), Tokenizer(ensure_model())
    tokens = cycles = 0
    for prompt in PROMPTS:
        ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
        made = list(engine.generate(ids, Sampling(max_tokens=48), SpecSettings(3)))[1:-1]
        tokens += sum(len(cycle.token_ids) for cycle in made)
        cycles += len(made)
    # 130 tokens or so; in bfloat16 a batched forward may break ties otherwise than a single one.
    assert predicted == pytest.approx(tokens / cycles, rel=0.15)


def test_the_probe_finds_that_one_layer_off_is_worse(bench: Bench, trained: tuple[int, ...]) -> None:
    off = tuple(k - 1 for k in trained)
    probe = run_probe(bench, "vllm", Wiring(off))
    best = probe.better()
    assert best is not None and best.wiring.states[-1] == trained[-1]
    assert [finding.id for finding in probe_findings(probe)] == ["probe-better-neighbour"]
    loss = SoftLoss(bench, Unroller(bench, 1))
    assert in_errors(loss.of(fuse(bench, off)) - loss.of(fuse(bench, trained))) > 3


def test_a_norm_that_the_head_was_not_trained_with_is_found(bench: Bench, trained: tuple[int, ...]) -> None:
    probe = run_probe(bench, "vllm", Wiring(trained, normed_residual=True))
    best = probe.better()
    assert best is not None and best.wiring.change == "norm before the residual off"
    right = run_probe(bench, "vllm", Wiring(trained))
    assert right.better() is None
    assert right.base.result.accept_length() == best.result.accept_length()


def test_the_scan_goes_to_the_trained_layers_without_being_told(bench: Bench, trained: tuple[int, ...]) -> None:
    scan = run_scan(bench, list, lambda text: None)
    # This little text tells the last state exactly and the others to two layers; the benchmark uses 30 times more.
    assert scan.best[-1] == trained[-1]
    assert all(abs(a - b) <= 2 for a, b in zip(scan.best, trained, strict=True))
    assert scan.evaluations < scan.combinations / 20
