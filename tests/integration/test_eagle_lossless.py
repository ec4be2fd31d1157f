"""Speculative sampling gives out what plain sampling would: 20,000 draws against exact probabilities by chi-square."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from specmeter.eagle import worker as worker_module
from specmeter.eagle.engine import Engine, SpecSettings
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.settings import Sampling
from specmeter.eagle.worker import Sequence, Worker
from tests.support.table_models import SHAPES, exact, favour_drafts, p_values, pairs
from tests.support.tiny_eagle import VOCAB, write_head, write_target

DRAWS = 20_000
CYCLE_DRAWS = 20_000
SAMPLINGS = [Sampling(temperature=1.0, seed=11), Sampling(temperature=0.7, top_p=0.8, seed=12)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["t1", "t0.7-p0.8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_token_and_pair_are_distributed_as_in_plain_sampling(shape: str, sampling: Sampling) -> None:
    first, pair = p_values(pairs(sampling, *SHAPES[shape], DRAWS), exact(sampling))
    assert first > 1e-3 and pair > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_planted_bias_is_noticed(shape: str) -> None:
    first, pair = p_values(pairs(SAMPLINGS[0], *SHAPES[shape], DRAWS, accept_with=favour_drafts), exact(SAMPLINGS[0]))
    assert first < 1e-6 and pair < 1e-6


def test_a_wrong_distribution_after_a_rejection_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A planted fault in the other branch: after a rejection the draw is not from max(p - q, 0).
    original = Tensor.clamp_
    monkeypatch.setattr(Tensor, "clamp_", lambda self, min: original(self, min=min).add_(0.2))
    first, _ = p_values(pairs(SAMPLINGS[0], *SHAPES["chain"], DRAWS), exact(SAMPLINGS[0]))
    assert first < 1e-6


PROMPT = [5, 1, 20, 7]
SETTINGS = {"chain": SpecSettings(2), "tree": SpecSettings(2, 3, 6)}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """A small whole engine, its draft head and caches included."""
    root = tmp_path_factory.mktemp("tiny")
    target, head = write_target(root / "target"), write_head(root / "head")
    return Engine.load(target, head, dtype="float32", threads=1, max_context=64).worker


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_whole_cycles_give_the_pairs_that_plain_decoding_gives(worker: Worker, settings: SpecSettings) -> None:
    sampling = Sampling(temperature=1.2, top_p=0.95, seed=21)
    counts, accepted, first = cycle_pairs(worker, sampling, settings)
    chances = p_values(counts, exact_pairs(worker, sampling, first))
    assert accepted > CYCLE_DRAWS / 50
    assert min(chances) > 1e-3


def test_a_planted_bias_in_whole_cycles_is_noticed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "accept", favour_drafts)
    sampling = Sampling(temperature=1.2, seed=21)
    counts, _, first = cycle_pairs(worker, sampling, SETTINGS["chain"])
    assert p_values(counts, exact_pairs(worker, sampling, first))[0] < 1e-4


def cycle_pairs(
    worker: Worker, sampling: Sampling, settings: SpecSettings
) -> tuple[Counter[tuple[int, int]], int, int]:
    """Runs cycles from one and the same prefill: pairs of first tokens, accepted drafts, the prefill's token."""
    sequence = Sequence(PROMPT, sampling, settings, Sampler(sampling), room=10**9)
    worker.prefill(sequence)
    start = vars(sequence).copy()
    counts, accepted = Counter[tuple[int, int]](), 0
    for _ in range(CYCLE_DRAWS):
        vars(sequence).update(start)
        worker.target_cache.length = worker.draft_cache.length = len(PROMPT)
        tokens: list[int] = []
        while len(tokens) < 2:
            cycle = worker.cycle(sequence)
            accepted += cycle.accepted
            tokens += cycle.token_ids
        counts[tokens[0], tokens[1]] += 1
    return counts, accepted, int(start["pending"])


def exact_pairs(worker: Worker, sampling: Sampling, first: int) -> np.ndarray:
    """The exact probability of each pair after ``PROMPT`` and ``first``, [vocab, vocab], from plain forwards."""

    def following(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            worker.target_cache.length = 0
            hidden, _ = worker._prefill_target(torch.tensor(tokens), capture=False)
            return Sampler(sampling).distribution(worker.target.logits(hidden)[0]).double()

    seen = [*PROMPT, first]
    rows = torch.stack([following([*seen, token]) for token in range(VOCAB)])
    return (following(seen)[:, None] * rows).numpy()
