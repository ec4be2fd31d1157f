"""Greedy decoding of many prompts by the embedded engine, in a process of its own for each core.

Plain decoding of a prompt costs as many forwards as it gives tokens. One forward over prompt and answer gives the plain
model's greedy token after every prefix of the answer at once, and that is the whole of what the answer must equal: the
first token is the plain model's after the prompt, and each further one its token after the same tokens before.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from specmeter.eagle.engine import Engine, Sampling, SpecSettings

# One a process. More are faster on a quiet machine; on a busy one they wait for each other, for hours.
THREADS = 1
PROCESSES = 2


@dataclass(frozen=True)
class Decoded:
    """An answer: its tokens, the accepted drafts and the cycles that it took."""

    tokens: list[int]
    accepted: int
    cycles: int


@dataclass(frozen=True)
class Answers:
    """One prompt's answers by setting; ``greedy`` is the plain model's token after each prefix of ``answers`` of that
    setting; ``plain`` the answer of plain decoding itself, where it was asked for."""

    answers: dict[str, Decoded]
    greedy: dict[str, list[int]]
    plain: list[int] | None


def decode(engine: Engine, prompt: list[int], spec: SpecSettings | None, count: int) -> Decoded:
    """``count`` tokens, end tokens among them."""
    cycles = list(engine.generate(prompt, Sampling(max_tokens=count, ignore_eos=True), spec))
    tokens = [token for cycle in cycles for token in cycle.token_ids]
    return Decoded(tokens, sum(cycle.accepted for cycle in cycles), len(cycles) - 1)


def greedy_after(engine: Engine, prompt: list[int], tokens: list[int]) -> list[int]:
    """The plain model's greedy token after ``prompt`` and each prefix of ``tokens``: one forward, nothing cached."""
    seen = torch.tensor([*prompt, *tokens[:-1]])
    rows = len(seen)
    mask = torch.full((rows, rows), float("-inf"), dtype=engine.target.dtype).triu(1)
    with torch.inference_mode():
        cache = engine.target.new_cache(rows)
        hidden, _ = engine.target.forward(seen, torch.arange(rows), mask, cache, 0, capture=False)
        found: list[int] = engine.target.logits(hidden[len(prompt) - 1 :]).argmax(dim=-1).tolist()
    return found


def answer_all(
    model: Path, head: Path, settings: Mapping[str, SpecSettings], prompts: Sequence[list[int]], plain: Sequence[int],
    count: int,
) -> list[Answers]:  # fmt: skip
    """Every prompt in float32 under every setting, shared out over the cores; ``plain``: places decoded plainly too."""
    jobs = [(place, prompt, place in plain) for place, prompt in enumerate(prompts)]
    shares = [jobs[first::PROCESSES] for first in range(PROCESSES)]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_share, model, head, dict(settings), share, count) for share in shares]
        found = {place: answers for part in parts for place, answers in part.result()}
    return [found[place] for place in range(len(prompts))]


def _share(
    model: Path, head: Path, settings: dict[str, SpecSettings], jobs: list[tuple[int, list[int], bool]], count: int
) -> list[tuple[int, Answers]]:
    engine = Engine.load(model, head, dtype="float32", threads=THREADS)
    found = []
    for place, prompt, plainly in jobs:
        answers = {name: decode(engine, prompt, spec, count) for name, spec in settings.items()}
        greedy: dict[str, list[int]] = {}
        for name, answer in answers.items():
            same = next((other for other in greedy if answers[other].tokens == answer.tokens), None)
            greedy[name] = greedy[same] if same else greedy_after(engine, prompt, answer.tokens)
        plain = decode(engine, prompt, None, count).tokens if plainly else None
        found.append((place, Answers(answers, greedy, plain)))
    return found
