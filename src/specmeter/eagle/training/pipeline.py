"""From a target to a corpus: user turns, answers, and the real-prompt evaluation that shares the generator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.eagle.training.data import Corpus, is_held_out, make_corpus
from specmeter.eagle.training.evaluate import chain_acceptance
from specmeter.eagle.training.generate import Answer, Generator, Job
from specmeter.eagle.training.head import Head
from specmeter.eagle.training.prompts import (
    ASSISTANT,
    SYSTEM,
    USER,
    grounded_turns,
    local_texts,
    openers,
    written_turns,
)
from specmeter.eagle.training.target import BatchedTarget

EVAL_PROMPTS = Path(__file__).with_name("eval_prompts.json")
TURN_TOKENS = 96
LONGEST_GROUNDED_CHARS = 5000


@dataclass(frozen=True)
class CorpusSettings:
    """How much to generate: ``seconds`` and ``answer_tokens`` are both limits. Held out: ``held_out_per_mille``."""

    seconds: float
    answer_tokens: int
    seed: int
    answer_limit: int = 320
    greedy_share: float = 0.55
    held_out_per_mille: int = 15
    mean_answer: int = 170


class Writer:
    """Writes a corpus with one target. ``encode`` turns text with special tokens into token ids."""

    def __init__(
        self,
        generator: Generator,
        encode: Callable[[str], list[int]],
        specials: Sequence[int],
        say: Callable[[str], None] = print,
    ) -> None:
        self.generator, self.encode, self.specials, self.say = generator, encode, set(specials), say

    def corpus(self, settings: CorpusSettings) -> Corpus:
        """Prompts, then answers; stops at the first of the limits."""
        started = time.monotonic()
        random = np.random.default_rng(settings.seed)
        wanted = max(8, settings.answer_tokens // settings.mean_answer)
        prompts = self._prompts(wanted, random, started + 0.3 * settings.seconds)
        self.say(f"{len(prompts)} prompts after {time.monotonic() - started:.0f} s")
        held_out = [is_held_out(prompt, settings.held_out_per_mille) for prompt in prompts]
        # Held-out answers are greedy, so that chain acceptance on them is exact.
        greedy = random.random(len(prompts)) < settings.greedy_share
        jobs = [
            Job(prompt, 0.0 if kept or plain else float(random.uniform(0.5, 1.0)))
            for prompt, kept, plain in zip(prompts, held_out, greedy, strict=True)
        ]
        deadline = started + settings.seconds
        answers = self._answers(jobs, settings, deadline)
        return make_corpus(
            [prompts[a.job] for a in answers],
            [a.tokens for a in answers],
            [jobs[a.job].temperature == 0.0 for a in answers],
            [held_out[a.job] for a in answers],
        )

    def _answers(self, jobs: list[Job], settings: CorpusSettings, deadline: float) -> list[Answer]:
        started, answers, tokens = time.monotonic(), [], 0
        said = started
        for answer in self.generator.run(jobs, settings.answer_limit, deadline):
            answers.append(answer)
            tokens += len(answer.tokens)
            if tokens >= settings.answer_tokens:
                break
            if time.monotonic() - said > 10:
                said = time.monotonic()
                self.say(f"{tokens} answer tokens, {tokens / (said - started):.0f} tok/s, {deadline - said:.0f} s left")
        spent = time.monotonic() - started
        ended = sum(a.ended for a in answers)
        self.say(f"{len(answers)} answers, {tokens} tokens in {spent:.1f} s, {ended} ended by themselves")
        return answers

    def _prompts(self, wanted: int, random: np.random.Generator, deadline: float) -> list[list[int]]:
        """About ``wanted`` different prompts: sampled, written and grounded user turns and raw text, shuffled."""
        written = written_turns(random, int(0.2 * wanted))
        grounded = grounded_turns(random, int(0.2 * wanted), LONGEST_GROUNDED_CHARS)
        prompts = [self.encode(SYSTEM + USER + turn + ASSISTANT) for turn in written + grounded]
        prompts += [prompt for prompt in self._raw(int(0.05 * wanted), random) if prompt]
        prompts += self._sampled(int(0.75 * wanted), random, deadline)
        different = list({tuple(prompt): prompt for prompt in prompts}.values())
        return [different[int(i)] for i in random.permutation(len(different))]

    def _sampled(self, count: int, random: np.random.Generator, deadline: float) -> list[list[int]]:
        """User turns of the model's own: a quarter from nothing, the rest from an opener; unfinished ones drop out."""
        starts = ["", *openers()]
        picks = [0 if random.random() < 0.25 else int(random.integers(len(starts))) for _ in range(count)]
        begun = [self.encode(SYSTEM + USER + starts[pick]) for pick in picks]
        close = self.encode(ASSISTANT)
        prompts = []
        for turn in self.generator.run([Job(ids, 1.0) for ids in begun], TURN_TOKENS, deadline):
            text = turn.tokens[:-1]
            if turn.ended and len(text) >= 3 and not self.specials & set(text):
                prompts.append(begun[turn.job] + text + close)
        return prompts

    def _raw(self, count: int, random: np.random.Generator) -> list[list[int]]:
        prose, code = local_texts()
        pool = prose + code
        if not pool:
            return []
        texts = [pool[int(random.integers(len(pool)))] for _ in range(count)]
        return [self.encode(text[: int(random.uniform(40, 800))]) for text in texts]


def evaluation_prompts() -> list[dict[str, str]]:
    """The real-world evaluation prompts: ``kind`` and ``prompt`` each. Training never reads them."""
    loaded: list[dict[str, str]] = json.loads(EVAL_PROMPTS.read_text(encoding="utf-8"))
    return loaded


def evaluate_prompts(
    heads: dict[str, Head],
    target: BatchedTarget,
    generator: Generator,
    encode: Callable[[str], list[int]],
    new_tokens: int,
    steps: int = 6,
) -> dict[str, Any]:
    """Greedy answers of ``new_tokens`` at most to the evaluation prompts; each head's acceptance by kind."""
    prompts = evaluation_prompts()
    ids = [encode(SYSTEM + USER + prompt["prompt"] + ASSISTANT) for prompt in prompts]
    answers = sorted(generator.run([Job(prompt, 0.0) for prompt in ids], new_tokens), key=lambda a: a.job)
    kept = [a for a in answers if len(a.tokens) >= 4]
    corpus = make_corpus([ids[a.job] for a in kept], [a.tokens for a in kept], [True] * len(kept), [True] * len(kept))
    kinds = [prompts[a.job]["kind"] for a in kept]
    result: dict[str, Any] = {"prompts": len(kept), "new_tokens": new_tokens}
    for name, head in heads.items():
        measured = {"all": _accept(head, target, corpus, range(len(kept)), steps)}
        for kind in dict.fromkeys(kinds):
            members = [index for index, own in enumerate(kinds) if own == kind]
            measured[kind] = _accept(head, target, corpus, members, steps)
        result[name] = measured
    return result


def _accept(head: Head, target: BatchedTarget, corpus: Corpus, members: Sequence[int], steps: int) -> dict[str, Any]:
    groups = [[index] for index in members]
    return chain_acceptance(head, target, corpus, groups, steps).summary()
