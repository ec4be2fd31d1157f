"""Speculative sampling gives out what plain sampling would: 20,000 draws against exact probabilities by chi-square."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from specmeter.eagle.engine import SpecSettings
from specmeter.eagle.settings import Sampling
from tests.support.cycle_draws import draw_pairs, exact_pairs, small_worker
from tests.support.table_models import SHAPES, exact, favour_drafts, p_values, pairs
from tests.support.tiny_eagle import write_head, write_target

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


SETTINGS = {
    "chain": SpecSettings(2),
    "tree": SpecSettings(2, 3, 6),
    "chain ended early": SpecSettings(3, speculative_draft_p_min=0.1),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return write_target(root / "target"), write_head(root / "head")


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_whole_cycles_give_the_pairs_that_plain_decoding_gives(
    folders: tuple[Path, Path], settings: SpecSettings
) -> None:
    sampling = Sampling(temperature=1.2, top_p=0.95, seed=21)
    found = draw_pairs(folders, sampling, settings, CYCLE_DRAWS)
    chances = p_values(found.counts, exact_pairs(small_worker(*folders), sampling, found.first))
    assert found.accepted > CYCLE_DRAWS / 50
    assert min(chances) > 1e-3


def test_a_planted_bias_in_whole_cycles_is_noticed(folders: tuple[Path, Path]) -> None:
    # With a quarter of the draws that the tests above have: the more draws, the easier it is to notice.
    sampling = Sampling(temperature=1.2, seed=21)
    found = draw_pairs(folders, sampling, SETTINGS["chain"], CYCLE_DRAWS // 4, biased=True)
    assert p_values(found.counts, exact_pairs(small_worker(*folders), sampling, found.first))[0] < 1e-4
