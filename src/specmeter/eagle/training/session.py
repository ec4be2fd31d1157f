"""One training session from start to end: corpus, draft vocabulary, training, evaluation, files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specmeter.eagle.config import LlamaConfig
from specmeter.eagle.training.data import Corpus, batches, choose_draft_vocab, make_batch
from specmeter.eagle.training.evaluate import chain_acceptance
from specmeter.eagle.training.generate import Generator
from specmeter.eagle.training.head import Head, head_shape, load_head
from specmeter.eagle.training.loop import Trainer, TrainSettings
from specmeter.eagle.training.pipeline import CorpusSettings, Writer, evaluate_prompts
from specmeter.eagle.training.target import BatchedTarget
from specmeter.errors import SpecmeterError

SMOLLM2_135M = LlamaConfig(
    family="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
END_IDS = (0, 2)
SPECIAL_IDS = tuple(range(17))
BYTE_IDS = tuple(range(17, 273))
GPU_KV_BYTES = 40 << 30
CPU_KV_BYTES = 2 << 30

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What ``specmeter train`` was asked for; the fields are its arguments. ``model`` None: a random target."""

    out: Path
    model: Path | None
    device: str
    seed: int
    minutes: float
    generate_minutes: float
    tokens: int
    init: Path | None
    compare: Path | None
    capture: tuple[int, ...]
    draft_vocab: int
    intermediate_size: int
    steps: int
    batch_tokens: int
    batch_rows: int
    learning_rate: float
    target_temperature: float
    max_steps: int | None
    answer_limit: int
    evaluate_tokens: int
    command: str


def train(request: Request, say: Say) -> dict[str, Any]:
    """The whole session; returns and writes ``result.json``. A repeated call goes on where an earlier one stopped."""
    os.umask(0o077)
    request.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(request.seed)
    device, dtype = torch.device(request.device), torch.bfloat16
    if request.model is None:
        target = BatchedTarget.random(SMOLLM2_135M, device, dtype, request.seed)
    else:
        target = BatchedTarget.from_dir(request.model, device, dtype)
    encode = _encoder(request.model)
    kv_bytes = GPU_KV_BYTES if request.device == "cuda" else CPU_KV_BYTES
    generator = Generator(target, END_IDS, request.batch_rows, kv_bytes, say=say)
    corpus = _corpus(request, generator, encode, say)
    # The cache's gigabytes go back before training; evaluation makes a small one again.
    generator.release()
    head = _head(request, target, corpus, say)
    settings = TrainSettings(
        seconds=60 * request.minutes,
        seed=request.seed,
        steps=request.steps,
        batch_tokens=request.batch_tokens,
        learning_rate=request.learning_rate,
        temperature=request.target_temperature,
        most_steps=request.max_steps,
    )
    note = {"command": request.command, "seed": request.seed, "answer_tokens": corpus.answer_tokens}
    trainer = Trainer(head, target, corpus, settings, request.out, note, say)
    trainer.run()
    result = {
        "answer_tokens": corpus.answer_tokens,
        "sequences": len(corpus),
        "optimizer_steps": trainer.step,
        "settings": asdict(settings),
        "shape": asdict(head.shape),
        "head_bytes": head.shape.bytes,
        "draft_coverage": _coverage(corpus, head),
    }
    _write(request.out / "result.json", result)
    result.update(_evaluate(request, target, generator, corpus, encode, say))
    _write(request.out / "result.json", result)
    return result


def _corpus(request: Request, generator: Generator, encode: Callable[[str], list[int]], say: Say) -> Corpus:
    path = request.out / "corpus.npz"
    if path.exists():
        say(f"reusing {path}")
        return Corpus.load(path)
    writer = Writer(generator, encode, SPECIAL_IDS, say)
    wanted = CorpusSettings(60 * request.generate_minutes, request.tokens, request.seed, request.answer_limit)
    if request.tokens < 1_000_000:
        # A short run would otherwise hold out next to nothing to evaluate on.
        wanted = replace(wanted, held_out_per_mille=150)
    corpus = writer.corpus(wanted)
    if len(corpus) - int(corpus.held_out.sum()) < 4:
        raise SpecmeterError(
            "There is too little data to train on.",
            f"{len(corpus)} answers were written in {request.generate_minutes} minutes.",
            "Give more --generate-minutes or --tokens.",
        )
    corpus.save(path)
    say(f"corpus: {len(corpus)} sequences, {corpus.answer_tokens} answer tokens, {int(corpus.held_out.sum())} held out")
    return corpus


def _head(request: Request, target: BatchedTarget, corpus: Corpus, say: Say) -> Head:
    if request.init is not None:
        return load_head(request.init, target.device, torch.bfloat16)
    shape = head_shape(target, request.capture, request.draft_vocab, request.intermediate_size)
    frequencies = corpus.frequencies(target.config.vocab_size)
    ids = choose_draft_vocab(frequencies, request.draft_vocab, SPECIAL_IDS + BYTE_IDS)
    head = Head(shape, torch.from_numpy(ids), torch.bfloat16).to(target.device)
    sample = make_batch(corpus, next(batches(corpus, request.batch_tokens, 0, False)), 1, target.device)
    states, _ = target.states(sample.ids, shape.capture)
    rows = sample.rows[0]
    head.start_from_target(target, states.reshape(-1, states.shape[-1])[rows])
    say(f"head: {sum(p.numel() for p in head.weights) / 1e6:.2f} M parameters, {shape.bytes / 1e6:.1f} MB")
    for size in (6144, 8192, 9216, 12288, 16384):
        kept = choose_draft_vocab(frequencies, size, SPECIAL_IDS + BYTE_IDS)
        say(f"a draft vocabulary of {size} covers {frequencies[kept].sum() / max(1, frequencies.sum()):.4f}")
    return head


def _evaluate(
    request: Request,
    target: BatchedTarget,
    generator: Generator,
    corpus: Corpus,
    encode: Callable[[str], list[int]],
    say: Say,
) -> dict[str, Any]:
    heads = {"trained": load_head(request.out / "head", target.device, torch.bfloat16)}
    if request.compare is not None:
        heads["compared"] = load_head(request.compare, target.device, torch.bfloat16)
    groups = [[i for i in g if corpus.greedy[i]] for g in batches(corpus, request.batch_tokens, 1, True)]
    groups = [group for group in groups if group]
    result: dict[str, Any] = {"held_out": {}}
    for name, head in heads.items():
        measured = chain_acceptance(head, target, corpus, groups, 6).summary()
        result["held_out"][name] = measured
        say(f"{name} held out: {measured}")
    if request.evaluate_tokens > 0:
        result["prompts"] = evaluate_prompts(heads, target, generator, encode, request.evaluate_tokens)
        for name in heads:
            say(f"{name} on evaluation prompts: {result['prompts'][name]['all']}")
    return result


def _coverage(corpus: Corpus, head: Head) -> float:
    frequencies = corpus.frequencies(head.shape.vocab_size)
    kept = frequencies[head.draft_ids.cpu().numpy()].sum()
    return round(float(kept / max(1, frequencies.sum())), 5)


def _encoder(model: Path | None) -> Callable[[str], list[int]]:
    if model is None:
        # Random weights understand no text: any fixed map from text to ids does.
        return lambda text: [300 + byte for byte in text.encode()][-400:]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name("." + path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
