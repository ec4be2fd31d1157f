"""Expected accept length from acceptance by position; distinct experts; what a forward reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.acceptance_model import conditional_acceptance, conditional_from_lengths, expected_length
from specmeter.analysis.costmodel_bytes import forward_bytes, read_shape
from specmeter.analysis.moe import Experts, distinct_experts
from specmeter.errors import SpecmeterError


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_one_rate_for_all_positions_is_the_closed_form(rate: float, steps: int) -> None:
    # Leviathan et al., equation 1.
    assert expected_length([rate] * 5, steps).tokens == pytest.approx((1 - rate ** (steps + 1)) / (1 - rate))


def test_every_shorter_chain_follows_from_the_longest() -> None:
    rng = np.random.default_rng(1)
    rates = np.array([0.8, 0.6, 0.7, 0.3])
    drawn = np.cumprod(rng.random((200_000, 4)) < rates, axis=1).sum(axis=1)
    kept = [(drawn >= j).sum() for j in range(5)]
    found = conditional_acceptance(kept)
    assert found == pytest.approx(rates, abs=0.01)
    for steps in range(1, 5):
        assert expected_length(found, steps).tokens == pytest.approx(1 + np.minimum(drawn, steps).mean(), abs=1e-9)


def test_a_longer_chain_than_any_measured_is_said_to_be_extrapolated() -> None:
    known = expected_length([0.8, 0.5], 2)
    beyond = expected_length([0.8, 0.5], 4)
    assert not known.extrapolated and known.low == known.tokens == known.high
    assert beyond.extrapolated and known.tokens == beyond.low < beyond.tokens < beyond.high < 5


def test_positions_that_nothing_reached_are_not_known() -> None:
    assert list(conditional_acceptance([10, 5, 0, 0])) == [0.5, 0.0]


def test_nothing_recorded_is_an_error() -> None:
    with pytest.raises(SpecmeterError, match="No acceptance"):
        expected_length([], 2)


def test_two_lengths_fix_a_falling_acceptance() -> None:
    truth = 0.75 * 0.9 ** np.arange(7)
    lengths = [(k, expected_length(truth, k).tokens) for k in (2, 5)]
    assert conditional_from_lengths(lengths, 7) == pytest.approx(truth, abs=1e-4)


def test_lengths_that_no_chain_has_are_refused() -> None:
    with pytest.raises(SpecmeterError, match="fit no falling acceptance"):
        conditional_from_lengths([(2, 1.2), (5, 5.5)], 6)


def test_distinct_experts_against_a_draw() -> None:
    rng = np.random.default_rng(2)
    experts, tokens = Experts(32, 4), 6
    drawn = [len({int(e) for _ in range(tokens) for e in rng.choice(32, size=4, replace=False)}) for _ in range(4000)]
    assert distinct_experts(experts, tokens) == pytest.approx(np.mean(drawn), rel=0.01)
    assert distinct_experts(experts, 1) == pytest.approx(4)
    assert distinct_experts(experts, 1000) == pytest.approx(32)


@pytest.mark.parametrize("words", ["128", "8/128", "a/b", "0/0"])
def test_experts_that_make_no_sense(words: str) -> None:
    with pytest.raises(SpecmeterError):
        Experts.parse(words)


LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip


def shape_of(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, **changes}))
    return path


def test_a_dense_model_reads_its_weights_once(tmp_path: Path) -> None:
    shape = read_shape(shape_of(tmp_path))
    one, six = (forward_bytes(shape, n, context=1000) for n in (1, 6))
    # Llama-3.1-8B has 8.03e9 parameters, 0.525e9 of them the embedding, of which a forward reads a few rows.
    assert one.weights == pytest.approx(2 * (8.03e9 - 0.525e9), rel=0.001)
    assert one.kv == 2 * 32 * 8 * 128 * 1000 * 2 and six.total == one.total
    assert forward_bytes(shape, 1, context=1000, batch=3).kv == 3 * one.kv


def test_a_mixture_reads_more_experts_for_more_tokens(tmp_path: Path) -> None:
    # Qwen3-30B-A3B: 30.5e9 parameters, 3.3e9 of them active for a token.
    path = shape_of(
        tmp_path, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
    )  # fmt: skip
    shape = read_shape(path.parent)
    one, many = forward_bytes(shape, 1, 0), forward_bytes(shape, 100_000, 0)
    embedding = 151936 * 2048
    assert (one.total / 2 + embedding) == pytest.approx(3.35e9, rel=0.02)
    assert (many.total / 2 + embedding) == pytest.approx(30.5e9, rel=0.01)
    assert forward_bytes(shape, 4, 0).experts == pytest.approx(one.experts * 29.1 / 8, rel=0.01)


@pytest.mark.parametrize(("changes", "said"), [({"kv_lora_rank": 512}, "MLA"), ({"hidden_size": None}, "lacks")])
def test_a_shape_that_is_not_counted(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(SpecmeterError, match=said):
        read_shape(shape_of(tmp_path, **changes))
