"""The embedded engine on SmolLM2-135M-Instruct with the packaged head."""

from __future__ import annotations

import os
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
    # 16 s a prompt on two cores: every twentieth in CI, all fifty with SPECMETER_FULL=1 (about 13 minutes).
    engine = Engine.load(ensure_model(), HEAD, dtype="float32")
    gained = dict.fromkeys(SETTINGS, (0, 0))
    for prompt in prompts if os.environ.get("SPECMETER_FULL") else prompts[::20]:
        plain, _, _ = decode(engine, prompt, None)
        assert len(plain) == TOKENS
        for name, settings in SETTINGS.items():
            tokens, accepted, cycles = decode(engine, prompt, settings)
            assert tokens == plain, f"{name}: token {next(i for i in range(TOKENS) if tokens[i] != plain[i])} differs"
            gained[name] = (gained[name][0] + accepted, gained[name][1] + cycles)
    chain, tree = (1 + accepted / cycles for accepted, cycles in gained.values())
    assert chain > 1.8 and tree > chain


@pytest.mark.skipif(not os.environ.get("SPECMETER_FULL"), reason="minutes long: set SPECMETER_FULL=1")
def test_bfloat16_differs_from_plain_decoding_only_at_near_ties(prompts: list[list[int]]) -> None:
    engine = Engine.load(ensure_model(), HEAD, dtype="bfloat16")
    for prompt in prompts[::10]:
        plain, _, _ = decode(engine, prompt, None)
        for settings in SETTINGS.values():
            tokens, _, _ = decode(engine, prompt, settings)
            place = next((i for i in range(TOKENS) if tokens[i] != plain[i]), None)
            if place is None:
                continue
            with torch.inference_mode():
                engine.worker.target_cache.length = 0
                seen = torch.tensor(prompt + plain[:place])
                hidden, _ = engine.worker._prefill_target(seen, capture=False)
                logits = engine.target.logits(hidden)[0].float()
            best = float(logits.max())
            # bfloat16 has 8 bits: logits around 20 are 0.125 apart, and rounding on the way adds a few such steps.
            assert best - min(float(logits[plain[place]]), float(logits[tokens[place]])) <= 0.5
