"""The embedded engine on SmolLM2-135M-Instruct with the packaged head."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import specmeter.eagle
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.model_store import ensure_model

pytestmark = pytest.mark.engine

HEAD = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"
TOKENS = 128
# About eight minutes. More threads are faster on a quiet machine; on a busy one they wait for each other, for hours.
THREADS = 1
# How far apart, in bfloat16 steps of the largest logit, two tokens may be and still be called a tie.
STEPS = {"bfloat16": 4, "float16": 0.1}
SETTINGS = {"chain": SpecSettings(3), "tree": SpecSettings(3, 4, 10)}
TOPICS = ["the sea", "a lighthouse", "bread", "the Roman empire", "a lost dog", "chess", "photosynthesis", "trains"]
TOPICS += ["a thunderstorm", "mathematics"]
ASKS = [
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Write Python code that prints a sentence about {}.",
    "Why do people care about {}?",
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Fifty prompts in the chat template's form."""
    tokenizer = Tokenizer.from_file(str(ensure_model() / "tokenizer.json"))
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    texts = [form.format(ask.format(topic)) for topic in TOPICS for ask in ASKS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def decode(engine: Engine, prompt: list[int], spec: SpecSettings | None) -> tuple[list[int], int, int]:
    """Tokens, accepted drafts and cycles."""
    cycles = list(engine.generate(prompt, Sampling(max_tokens=TOKENS, ignore_eos=True), spec))
    tokens = [token for cycle in cycles for token in cycle.token_ids]
    return tokens, sum(cycle.accepted for cycle in cycles), len(cycles) - 1


def test_greedy_equals_plain_decoding_in_float32(prompts: list[list[int]]) -> None:
    engine = Engine.load(ensure_model(), HEAD, dtype="float32", threads=THREADS)
    gained = dict.fromkeys(SETTINGS, (0, 0))
    for prompt in prompts:
        plain, _, _ = decode(engine, prompt, None)
        assert len(plain) == TOKENS
        for name, settings in SETTINGS.items():
            tokens, accepted, cycles = decode(engine, prompt, settings)
            assert tokens == plain, f"{name}: token {next(i for i in range(TOKENS) if tokens[i] != plain[i])} differs"
            gained[name] = (gained[name][0] + accepted, gained[name][1] + cycles)
    chain, tree = (1 + accepted / cycles for accepted, cycles in gained.values())
    assert chain > 2.0 and tree > chain


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_difference_in_low_precision_is_a_near_tie(prompts: list[list[int]], dtype: str) -> None:
    engine = Engine.load(ensure_model(), HEAD, dtype=dtype, threads=THREADS)
    compared = 0
    for prompt in prompts[::10]:
        plain, _, _ = decode(engine, prompt, None)
        for settings in SETTINGS.values():
            tokens, _, _ = decode(engine, prompt, settings)
            compared += 1
            place = next((i for i in range(TOKENS) if tokens[i] != plain[i]), None)
            if place is None:
                continue
            logits = next_logits(engine, prompt + plain[:place])
            gap = float(logits.max()) - min(float(logits[plain[place]]), float(logits[tokens[place]]))
            # The logits' own spacing in bfloat16, of which rounding on the way through 30 layers adds up several.
            step = 2.0 ** (math.floor(math.log2(float(logits.abs().max()))) - 7)
            print(f"{dtype}: token {place}: gap {gap:.4f} = {gap / step:.1f} bfloat16 steps")
            assert gap <= STEPS[dtype] * step
    assert compared == 2 * len(prompts[::10])


def next_logits(engine: Engine, seen: list[int]) -> torch.Tensor:
    """The next token's logits [vocab] in float32 after ``seen``."""
    with torch.inference_mode():
        engine.worker.target_cache.length = 0
        hidden, _ = engine.worker._prefill_target(torch.tensor(seen), capture=False)
        return engine.target.logits(hidden)[0].float()
