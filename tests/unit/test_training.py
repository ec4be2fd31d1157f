"""Training of a head for a tiny random target: the loss falls, acceptance rises, and each part does what it says."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from specmeter.eagle.config import DraftConfig, LlamaConfig
from specmeter.eagle.training.data import Corpus, batches, choose_draft_vocab, is_held_out, make_batch, make_corpus
from specmeter.eagle.training.evaluate import Acceptance, chain_acceptance
from specmeter.eagle.training.generate import Generator, Job
from specmeter.eagle.training.head import Head, Past, head_shape, load_head
from specmeter.eagle.training.loop import Trainer, TrainSettings
from specmeter.eagle.training.loss import target_probabilities, unrolled_loss
from specmeter.eagle.training.pipeline import evaluate_prompts, evaluation_prompts
from specmeter.eagle.training.prompts import openers, written_turns
from specmeter.eagle.training.target import BatchedTarget
from specmeter.errors import SpecmeterError

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    family="llama",
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=240,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
CAPTURE = (1, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> BatchedTarget:
    return BatchedTarget.random(CONFIG, CPU, torch.float32, seed=3)


@pytest.fixture(scope="module")
def corpus(target: BatchedTarget) -> Corpus:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    prompts = [random.integers(20, 240, size=int(random.integers(3, 9))).tolist() for _ in range(160)]
    generator = Generator(target, (0, 2), 64, 1 << 28, say=lambda line: None)
    answers = list(generator.run([Job(prompt, 0.0) for prompt in prompts], 40))
    return make_corpus(
        [prompts[a.job] for a in answers],
        [a.tokens for a in answers],
        [True] * len(answers),
        [is_held_out(prompts[a.job], 200) for a in answers],
    )


def new_head(target: BatchedTarget, seed: int = 0) -> Head:
    torch.manual_seed(seed)
    return Head(head_shape(target, CAPTURE, 240, 96), torch.arange(240), torch.float32)


def test_generation_is_the_argmax_of_a_teacher_forced_forward(target: BatchedTarget, corpus: Corpus) -> None:
    for index in range(0, len(corpus), 17):
        ids = torch.from_numpy(corpus.sequence(index).astype(np.int64))[None]
        _, final = target.states(ids, CAPTURE)
        start = int(corpus.answer_start[index])
        assert torch.equal(target.logits(final)[0, start - 1 : -1].argmax(-1), ids[0, start:])


def test_sampling_follows_the_softmax_at_the_temperature(target: BatchedTarget) -> None:
    torch.manual_seed(1)
    generator = Generator(target, (0, 2), 4000, 1 << 30, min_p=1e-9, say=lambda line: None)
    drawn = [a.tokens[0] for a in generator.run([Job([30, 31], 0.8)] * 20_000, 2)]
    _, final = target.states(torch.tensor([[30, 31]]), CAPTURE)
    expected = torch.softmax(target.logits(final)[0, -1] / 0.8, dim=-1).numpy()
    found = np.bincount(drawn, minlength=240) / len(drawn)
    assert 0.5 * np.abs(found - expected).sum() < 0.05
    cold = torch.softmax(target.logits(final)[0, -1] / 0.5, dim=-1).numpy()
    assert 0.5 * np.abs(found - cold).sum() > 0.05


def test_a_row_of_the_unrolled_forward_is_a_chain_of_draft_steps(target: BatchedTarget) -> None:
    """The reference redoes each row as the engine would: a causal pass over true rows, then one row a step."""
    head = new_head(target)
    weights = head.cast()
    ids = torch.randint(20, 240, (1, 12), generator=torch.Generator().manual_seed(5))
    states, _ = target.states(ids, CAPTURE)
    embedded = [F.embedding(F.pad(ids[:, 1 + j :], (0, 1 + j)), target.embedding) for j in range(3)]
    past, hidden, outputs = Past(), head.fuse(weights, states), []
    for j in range(3):
        hidden = head.step(weights, embedded[j], hidden, past)
        outputs.append(hidden)
    row = 5
    inputs = torch.cat([head.fuse(weights, states)[:, : row + 1]], dim=1)
    tokens = embedded[0][:, : row + 1]
    for j in range(3):
        # A causal pass over rows 0..row+j: the true rows first, then the chain's own.
        found = head.step(weights, tokens, inputs, Past())[:, -1]
        assert torch.allclose(found, outputs[j][:, row], atol=1e-5), j
        inputs = torch.cat([inputs, found[:, None]], dim=1)
        if j < 2:
            tokens = torch.cat([tokens, embedded[j + 1][:, row : row + 1]], dim=1)


def test_the_loss_is_the_cross_entropy_and_its_gradient(target: BatchedTarget, corpus: Corpus) -> None:
    head = new_head(target)
    batch = make_batch(corpus, [0, 1, 2], 2, CPU)
    states, final = target.states(batch.ids, CAPTURE)
    wanted = target_probabilities(target, final, batch.positions, head.draft_ids, 1.0)
    loss, each = unrolled_loss(head, head.cast(), target, batch, states, wanted, 2, 0.5)
    loss.backward()
    found = [p.grad.clone() for p in head.weights if p.grad is not None]
    head.zero_grad()
    weights, past, plain = head.cast(), Past(), []
    hidden = head.fuse(weights, states)
    for j in range(2):
        embedded = F.embedding(F.pad(batch.ids[:, 1 + j :], (0, 1 + j)), target.embedding)
        hidden = head.step(weights, embedded, hidden, past)
        rows = head.final(weights, hidden.reshape(-1, 48)[batch.rows[j]])
        log_q = torch.log_softmax(rows @ weights["lm_head.weight"].T, dim=-1)
        truth = torch.softmax(target.logits(final), dim=-1).reshape(-1, 240)[batch.rows[j] + 1 + j]
        plain.append(-(truth * log_q).sum(-1).mean())
    (plain[0] * (1 / 1.5) + plain[1] * (0.5 / 1.5)).backward()
    assert torch.allclose(each, torch.stack(plain).detach(), atol=1e-5)
    assert len(found) == len(list(head.weights))
    for got, parameter in zip(found, head.weights, strict=True):
        assert parameter.grad is not None and torch.allclose(got, parameter.grad, atol=1e-6)


def test_rows_cover_the_answer_and_nothing_else() -> None:
    corpus = make_corpus([[9, 9, 9], [9]], [[1, 2, 3, 4], [5, 6, 7]], [True, True], [False, False])
    batch = make_batch(corpus, [0, 1], 3, CPU)
    width = batch.ids.shape[1]
    # Row t at step j predicts token t+2+j; the first answer token is the target's own, never drafted.
    predicted = [
        [int(batch.ids[r // width, r % width + 2 + j]) for r in rows.tolist()] for j, rows in enumerate(batch.rows)
    ]
    assert predicted == [[2, 3, 4, 6, 7], [3, 4, 7], [4]]
    for j, (rows, queries) in enumerate(zip(batch.rows, batch.queries, strict=True)):
        assert torch.equal(batch.positions[queries], rows + 1 + j)


def test_accept_length_over_cycles_and_positions() -> None:
    acceptance = Acceptance(2, [np.array([2, 0, 0, 1, 0])])
    assert acceptance.per_position() == [0.4, 0.2]
    assert acceptance.accept_length(2) == pytest.approx(1.6)
    # Cycles start at rows 0 (gains 3) and 3 (gains 2).
    assert acceptance.cycle_accept_length(2) == pytest.approx(2.5)


def train(target: BatchedTarget, corpus: Corpus, folder: Path, steps: int = 120) -> Trainer:
    settings = TrainSettings(
        seconds=1e6, seed=1, steps=3, batch_tokens=1024, learning_rate=3e-3, warmup_steps=5, ema=0.9,
        most_steps=steps, log_every=20, evaluate_every_s=1e6, checkpoint_every_s=1e6,
    )  # fmt: skip
    return Trainer(new_head(target), target, corpus, settings, folder, {"seed": 1}, lambda line: None)


def test_training_lowers_the_loss_and_raises_acceptance(target: BatchedTarget, corpus: Corpus, tmp_path: Path) -> None:
    trainer = train(target, corpus, tmp_path / "a")
    before = trainer.evaluate(steps=3)
    trainer.run()
    after = trainer.evaluate(steps=3)
    losses = [entry["loss_per_step"] for entry in trainer.log if entry["kind"] == "train"]
    # The entropy of a random target's own distribution stays: it is most of what is left.
    assert losses[-1][0] < losses[0][0] - 0.5 and losses[-1][2] < losses[0][2] - 0.2
    assert after["accept_length_per_position"][2] > before["accept_length_per_position"][2] + 0.3
    again = train(target, corpus, tmp_path / "b")
    again.run()
    assert [entry["loss_per_step"] for entry in again.log] == losses
    # What was saved is the averaged head in bf16, in the layout that the engine reads.
    head = load_head(tmp_path / "a" / "head", CPU, torch.float32)
    assert DraftConfig.from_dir(tmp_path / "a" / "head").capture == CAPTURE
    groups = list(batches(corpus, 1024, 1, True))
    saved = chain_acceptance(head, target, corpus, groups, 3).summary()
    assert saved["accept_length_per_position"][2] == pytest.approx(after["accept_length_per_position"][2], abs=0.1)


def test_a_stopped_training_goes_on_where_it_was(target: BatchedTarget, corpus: Corpus, tmp_path: Path) -> None:
    train(target, corpus, tmp_path, steps=10).run()
    resumed = train(target, corpus, tmp_path, steps=14)
    assert resumed.step == 10
    resumed.run()
    assert resumed.step == 14
    note = json.loads((tmp_path / "head" / "config.json").read_text())["specmeter_training"]
    assert note["optimizer_steps"] == 14 and note["seed"] == 1


def test_a_signal_saves_the_head_and_ends_the_whole_command(
    target: BatchedTarget, corpus: Corpus, tmp_path: Path
) -> None:
    trainer = train(target, corpus, tmp_path, steps=10_000)
    update, before = trainer._update, signal.getsignal(signal.SIGINT)

    def interrupted(batch: Any) -> torch.Tensor:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return update(batch)

    trainer._update = interrupted  # type: ignore[method-assign]
    # No evaluation of many minutes after it: whoever presses Ctrl-C waits for the head to be saved and no more.
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.step == 4 and signal.getsignal(signal.SIGINT) is before
    assert train(target, corpus, tmp_path, steps=6).step == 4 and not list(tmp_path.rglob("*partial*"))


def test_evaluation_prompts_are_many_and_unseen(target: BatchedTarget) -> None:
    prompts = evaluation_prompts()
    kinds = {prompt["kind"] for prompt in prompts}
    assert len(prompts) >= 40 and len(kinds) == 8 and len({p["prompt"] for p in prompts}) == len(prompts)
    written = set(written_turns(np.random.default_rng(0), 5000))
    assert not written & {prompt["prompt"] for prompt in prompts}
    assert len(set(openers())) == len(openers())
    generator = Generator(target, (0, 2), 48, 1 << 28, say=lambda line: None)
    result = evaluate_prompts(
        {"new": new_head(target)}, target, generator, lambda text: [20 + byte for byte in text.encode()[:20]], 8, 2
    )
    assert set(result["new"]) == kinds | {"all"} and result["new"]["all"]["sequences"] == result["prompts"]


def test_loops_end_a_row_early(target: BatchedTarget) -> None:
    class Looping(BatchedTarget):
        def logits(self, final: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
            return F.one_hot(torch.full(final.shape[:-1], 50), 240).float()

    looping = Looping(CONFIG, target.embedding, target.lm_head, target.norm, target.layers)
    answers = list(Generator(looping, (0, 2), 4, 1 << 28).run([Job([30], 0.0)] * 4, 300))
    assert {len(a.tokens) for a in answers} == {64} and not any(a.ended for a in answers)


def test_heads_that_no_engine_can_serve_are_refused(target: BatchedTarget) -> None:
    for capture in ((0, 1, 2), (1, 2, 4), (2, 1, 3)):
        with pytest.raises(SpecmeterError, match="cannot be served"):
            head_shape(target, capture, 240, 96)
    with pytest.raises(SpecmeterError, match="draft vocabulary"):
        head_shape(target, CAPTURE, 100, 96)


def test_draft_vocabulary_is_the_most_frequent_and_what_must_be_in() -> None:
    chosen = choose_draft_vocab(np.array([5, 0, 9, 1, 7]), 3, [1])
    assert chosen.tolist() == [1, 2, 4]


def test_corpus_survives_a_file(corpus: Corpus, tmp_path: Path) -> None:
    corpus.save(tmp_path / "c.npz")
    loaded = Corpus.load(tmp_path / "c.npz")
    assert np.array_equal(loaded.tokens, corpus.tokens) and np.array_equal(loaded.held_out, corpus.held_out)
    empty = replace(corpus, held_out=np.ones(len(corpus), dtype=np.bool_))
    assert empty.frequencies(240).sum() == 0 < corpus.frequencies(240).sum() < corpus.answer_tokens


def test_a_loss_that_is_not_finite_goes_back_to_the_checkpoint(
    target: BatchedTarget, corpus: Corpus, tmp_path: Path
) -> None:
    trainer = train(target, corpus, tmp_path, steps=20)
    trainer.save()
    with torch.no_grad():
        next(iter(trainer.head.weights)).fill_(float("nan"))
    trainer.run()
    assert trainer.rate_scale == 0.5 and all(torch.isfinite(p).all() for p in trainer.head.weights)
    head = load_head(tmp_path / "head", CPU, torch.float32)
    assert all(torch.isfinite(p).all() for p in head.weights)
