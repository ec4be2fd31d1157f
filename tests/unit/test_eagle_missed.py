"""The draft's own place of the token that a chain should have drafted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specmeter.eagle.draft import Draft
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.missed import OUTSIDE, Missed
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.worker import Sequence
from tests.support.tiny_eagle import write_head, write_target
from tests.unit.test_eagle_engine import prompts


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    root = Path(tmp_path_factory.mktemp("tiny"))
    return Engine.load(
        write_target(root / "target"), write_head(root / "head"), dtype="float32", threads=1, max_context=400
    )


def begun(engine: Engine, prompt: list[int], settings: SpecSettings, temperature: float = 0.0) -> Sequence:
    sampling = Sampling(max_tokens=60, ignore_eos=True, temperature=temperature, seed=1)
    sequence = Sequence(list(prompt), sampling, settings, Sampler(sampling), 60)
    engine.worker.prefill(sequence)
    return sequence


def test_places_by_hand() -> None:
    logits, head = torch.tensor([[0.5, 3.0, 2.0, 3.0]]), Draft.__new__(Draft)
    head.target_ids = torch.tensor([7, 13, 11, 9])
    assert Missed(logits, head, 11).rank == [3]
    assert Missed(logits, head, 7).rank == [4]
    assert Missed(logits, head, 9).rank == [2]  # as likely as the one that was drafted
    assert Missed(logits, head, 8).rank == [OUTSIDE] and Missed(logits, head, 99).rank == [OUTSIDE]
    assert Missed(logits.to("meta"), head, 11).rank == []


def test_a_tree_of_so_many_branches_keeps_what_the_chain_missed(engine: Engine) -> None:
    """One step each: the tree with r branches catches the target's token if its place is r or before, else not."""
    caught = 0
    for prompt in prompts(40, seed=3):
        chain = begun(engine, prompt, SpecSettings(1))
        kept = engine.worker.cycle(chain).accepted
        assert (chain.missed_rank == []) == (kept == 1)
        if kept:
            continue
        (place,) = chain.missed_rank
        for branches in (2, 4, 16):
            tree = begun(engine, prompt, SpecSettings(1, branches, branches + 1))
            accepted = engine.worker.cycle(tree).accepted
            assert accepted == (0 < place <= branches), (prompt, place, branches)
            assert tree.missed is None and tree.missed_rank == []
            caught += accepted
    assert caught > 3


def test_the_failure_is_told_where_it_stands(engine: Engine) -> None:
    """Of a chain of several, the place is that of the first draft that failed, and the next cycle's is its own."""
    seen = set()
    for prompt in prompts(30, seed=5):
        sequence = begun(engine, prompt, SpecSettings(4))
        for _ in range(4):
            cycle = engine.worker.cycle(sequence)
            assert (sequence.missed is None) == (cycle.accepted == cycle.drafted)
            if sequence.missed is not None:
                seen.add(cycle.accepted)
                assert sequence.missed.token == cycle.token_ids[-1]
                assert sequence.missed_rank[0] == OUTSIDE or sequence.missed_rank[0] >= 2
    assert len(seen) > 1


def test_drawn_drafts_tell_no_place(engine: Engine) -> None:
    sequence = begun(engine, prompts(1)[0], SpecSettings(3), temperature=1.0)
    for _ in range(5):
        engine.worker.cycle(sequence)
        assert sequence.missed is None
