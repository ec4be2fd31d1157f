"""The embedded engine on SmolLM2-135M-Instruct with the packaged head."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import specmeter.eagle
from specmeter.eagle import huge_pages
from specmeter.eagle.engine import Engine, SpecSettings
from specmeter.eagle.model_store import ensure_model
from tests.support.greedy_shares import THREADS, answer_all, decode, greedy_after

pytestmark = pytest.mark.engine

HEAD = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"
TOKENS = 128
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


def test_greedy_equals_plain_decoding_in_float32(prompts: list[list[int]]) -> None:
    # One prompt of each kind, each on another topic, is decoded plainly as well.
    plainly = [ask + len(ASKS) * (2 * ask) for ask in range(len(ASKS))]
    gained = dict.fromkeys(SETTINGS, (0, 0))
    compared = 0
    for place, found in enumerate(answer_all(ensure_model(), HEAD, SETTINGS, prompts, plainly, TOKENS)):
        assert (found.plain is not None) == (place in plainly)
        for name, answer in found.answers.items():
            greedy = found.greedy[name]
            assert len(answer.tokens) == len(greedy) == TOKENS
            differs = [i for i in range(TOKENS) if answer.tokens[i] != greedy[i]]
            assert not differs, f"{name}, prompt {place}: token {differs[0]} is not the plain model's"
            assert found.plain in (None, answer.tokens), f"{name}, prompt {place}: not what plain decoding gives"
            gained[name] = (gained[name][0] + answer.accepted, gained[name][1] + answer.cycles)
            compared += 1
    assert compared == len(SETTINGS) * 50
    chain, tree = (1 + accepted / cycles for accepted, cycles in gained.values())
    assert chain > 2.0 and tree > chain


@pytest.fixture(scope="module")
def engine() -> Engine:
    """In float32, with its weights in small pages until the test of huge ones, the last to use it."""
    return Engine.load(ensure_model(), HEAD, dtype="float32", threads=THREADS, huge_pages=False)


def test_a_wrong_token_is_noticed_by_one_forward(engine: Engine, prompts: list[list[int]]) -> None:
    plain = decode(engine, prompts[0], None, 24).tokens
    assert greedy_after(engine, prompts[0], plain) == plain
    for place in (0, 11, 23):
        wrong = [*plain[:place], plain[place] + 1, *plain[place + 1 :]]
        found = greedy_after(engine, prompts[0], wrong)
        assert found[: place + 1] == plain[: place + 1], "what comes before and at the wrong token is as it was"
        assert found[place] != wrong[place]


@pytest.mark.skipif(bool(huge_pages.refusal()), reason=f"no huge pages here: {huge_pages.refusal()}")
def test_tokens_are_the_same_from_huge_pages(engine: Engine, prompts: list[list[int]]) -> None:
    assert str(engine.huge_pages) == "no huge pages: turned off"
    before = [decode(engine, prompts[1], settings, 16).tokens for settings in (None, *SETTINGS.values())]
    found = huge_pages.collapse({})
    if not found.size:
        pytest.skip(str(found))
    # The weights of 135 M parameters in float32 are 540 MB, and the blocks that hold them are three quarters full.
    assert found.size > 300 << 20 and found.growth <= found.size // 4
    assert [decode(engine, prompts[1], settings, 16).tokens for settings in (None, *SETTINGS.values())] == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_difference_in_low_precision_is_a_near_tie(prompts: list[list[int]], dtype: str) -> None:
    engine = Engine.load(ensure_model(), HEAD, dtype=dtype, threads=THREADS)
    compared = 0
    for prompt in prompts[::10]:
        plain = decode(engine, prompt, None, TOKENS).tokens
        for settings in SETTINGS.values():
            tokens = decode(engine, prompt, settings, TOKENS).tokens
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
