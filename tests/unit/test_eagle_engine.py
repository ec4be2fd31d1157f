"""The embedded engine on small random models: speculation changes no token, caches hold what a fresh run would."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specmeter.eagle.accept import accept_greedy
from specmeter.eagle.engine import Cycle, Engine, Sampling, SpecSettings
from specmeter.eagle.linear import Int8Linear
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.settings import MAX_DRAFT_TOKENS
from specmeter.eagle.tree import ChainGrowth, DraftTree
from specmeter.errors import SpecmeterError
from tests.support.tiny_eagle import VOCAB, write_head, write_target

SETTINGS = [
    SpecSettings(1),
    SpecSettings(3),
    SpecSettings(6),
    SpecSettings(3, 1, 3),
    SpecSettings(2, 2),
    SpecSettings(3, 4, 12),
    SpecSettings(4, 8, 40),
    SpecSettings(6, 2, 2),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return write_target(root / "target"), write_head(root / "head")


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    return Engine.load(*folders, dtype="float32", threads=1, max_context=400)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))] for _ in range(count)]


def run(engine: Engine, prompt: list[int], spec: SpecSettings | None, **sampling: object) -> list[Cycle]:
    return list(engine.generate(prompt, Sampling(**{"max_tokens": 48, **sampling}), spec))  # type: ignore[arg-type]


def tokens(cycles: list[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.token_ids]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_speculation_equals_plain_decoding(engine: Engine, settings: SpecSettings) -> None:
    accepted = 0
    for prompt in prompts(12):
        cycles = run(engine, prompt, settings)
        assert tokens(cycles) == tokens(run(engine, prompt, None))
        assert all(cycle.drafted == settings.draft_tokens - 1 for cycle in cycles[1:])
        accepted += sum(cycle.accepted for cycle in cycles)
    # Without accepted drafts the equality above would show little.
    assert accepted > 10


@pytest.mark.parametrize("settings", [SpecSettings(6), SpecSettings(5, 2)], ids=["chain", "tree"])
def test_an_unsure_draft_ends_early_and_no_token_changes(engine: Engine, settings: SpecSettings) -> None:
    early = replace(settings, speculative_draft_p_min=0.1)
    drafted = []
    for prompt in prompts(12):
        cycles = run(engine, prompt, early)
        assert tokens(cycles) == tokens(run(engine, prompt, None))
        drafted += [cycle.drafted for cycle in cycles[1:]]
    assert min(drafted) < max(drafted) <= settings.draft_tokens - 1


@pytest.mark.parametrize("settings", [SpecSettings(4), SpecSettings(4, 3)], ids=["chain", "tree"])
def test_a_draft_in_8_bits_guesses_otherwise_and_no_token_changes(
    engine: Engine, folders: tuple[Path, Path], settings: SpecSettings
) -> None:
    coarse = Engine.load(*folders, dtype="float32", threads=1, max_context=400, draft_int8=True)
    accepted = 0
    for prompt in prompts(12):
        cycles = run(coarse, prompt, settings)
        assert tokens(cycles) == tokens(run(engine, prompt, None))
        accepted += sum(cycle.accepted for cycle in cycles)
    assert accepted > 10
    assert isinstance(coarse.draft.lm_head, Int8Linear) and not isinstance(engine.draft.lm_head, Int8Linear)


def test_a_further_step_is_drafted_while_the_path_is_likely_enough() -> None:
    likely = torch.log(torch.tensor([[0.8, 0.1, 0.1]]))
    growth = ChainGrowth(likely, torch.zeros(1, 4), torch.arange(3), Sampler(Sampling()))
    seen = [growth.probability()]
    for _ in range(2):
        growth.expand(likely, torch.zeros(1, 4))
        seen.append(growth.probability())
    assert seen == pytest.approx([0.8, 0.64, 0.512])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_families_decode_alike_with_and_without_speculation(tmp_path: Path, family: str) -> None:
    engine = Engine.load(
        write_target(tmp_path / "target", family), write_head(tmp_path / "head"), dtype="float32", max_context=200
    )
    for prompt in prompts(4):
        plain = tokens(run(engine, prompt, None))
        assert tokens(run(engine, prompt, SpecSettings(2))) == plain
        assert tokens(run(engine, prompt, SpecSettings(3, 3, 9))) == plain


def test_prompts_longer_than_one_prefill_chunk(folders: tuple[Path, Path]) -> None:
    engine = Engine.load(*folders, dtype="float32", threads=1, max_context=700)
    draw = random.Random(5)
    prompt = [draw.randrange(VOCAB) for _ in range(600)]
    plain = tokens(run(engine, prompt, None))
    assert tokens(run(engine, prompt, SpecSettings(3, 4, 12))) == plain
    assert tokens(run(engine, [*prompt, plain[0]], None))[:20] == plain[1:21]


def test_forward_over_a_tree_equals_forwards_over_its_paths(engine: Engine) -> None:
    worker, prompt = engine.worker, [3, 1, 4, 1, 5]
    tree = DraftTree([9, 2, 6, 5, 3, 5, 8], [-1, 0, 0, 1, 1, 2, 5])
    with torch.inference_mode():
        worker.target_cache.length = 0
        worker._prefill_target(torch.tensor(prompt), capture=False)
        verified = worker.verify(tree)
        for node in range(len(tree.tokens)):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            worker.target_cache.length = 0
            hidden, states = worker._prefill_target(torch.tensor(prompt + [tree.tokens[i] for i in path]), capture=True)
            torch.testing.assert_close(verified.logits[node], worker.target.logits(hidden)[0], rtol=1e-4, atol=1e-4)
            assert states is not None
            torch.testing.assert_close(verified.states[node], states[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [SpecSettings(3), SpecSettings(3, 4, 12)], ids=str)
def test_caches_hold_what_a_fresh_run_over_the_same_tokens_writes(
    engine: Engine, folders: tuple[Path, Path], settings: SpecSettings
) -> None:
    fresh = Engine.load(*folders, dtype="float32", threads=1, max_context=400)
    accepted = 0
    for prompt in prompts(4, seed=3):
        cycles = run(engine, prompt, settings)
        accepted += sum(cycle.accepted for cycle in cycles)
        # The last token given out is not in the cache; the request's end may have cut more off.
        sequence = prompt + tokens(cycles)[:-1]
        run(fresh, sequence, settings, max_tokens=1)
        target, draft = engine.worker.target_cache, engine.worker.draft_cache
        assert target.length == draft.length >= len(sequence)
        for kept, made in ((target, fresh.worker.target_cache), (draft, fresh.worker.draft_cache)):
            # The draft row of the last token was paired with the token cut off, so it is left out.
            size = len(sequence) - 1
            torch.testing.assert_close(kept.data[..., :size, :], made.data[..., :size, :], rtol=1e-4, atol=1e-4)
    assert accepted > 5


def test_greedy_accept_follows_the_branch_the_target_wants() -> None:
    tree = DraftTree([0, 1, 2, 3, 4], [-1, 0, 0, 2, 2])
    logits = torch.zeros(5, 6)
    for node, wanted in enumerate([2, 5, 4, 5, 5]):
        logits[node, wanted] = 1.0
    accepted = accept_greedy(tree, logits)
    assert (accepted.path, accepted.tokens) == ([0, 2, 4], [2, 4, 5])


def test_largest_draft_fits_at_the_end_of_the_context(folders: tuple[Path, Path]) -> None:
    engine = Engine.load(*folders, dtype="float32", threads=1, max_context=40)
    cycles = run(engine, [1, 2, 3], SpecSettings(8, 8, MAX_DRAFT_TOKENS), max_tokens=1000)
    assert len(tokens(cycles)) == 37
    assert cycles[-1].finish == "length"
    assert tokens(cycles) == tokens(run(engine, [1, 2, 3], None, max_tokens=1000))


def test_stop_token_ends_the_request_and_is_the_last_one_given_out(engine: Engine) -> None:
    plain = tokens(run(engine, [1, 2, 3], None))
    stop = plain[10]
    first = plain.index(stop)
    for spec in (None, SpecSettings(4), SpecSettings(3, 4, 12)):
        cycles = run(engine, [1, 2, 3], spec, stop_ids=(stop,))
        assert tokens(cycles) == plain[: first + 1]
        assert cycles[-1].finish == "stop"
        assert len(tokens(run(engine, [1, 2, 3], spec, stop_ids=(stop,), ignore_eos=True))) == 48


def test_a_closed_iterator_frees_the_engine_and_an_open_one_holds_it(engine: Engine) -> None:
    first = engine.generate([1, 2], Sampling(), SpecSettings(2))
    next(first)
    with pytest.raises(SpecmeterError, match="busy"):
        next(engine.generate([1, 2], Sampling(), None))
    first.close()  # type: ignore[attr-defined]
    assert tokens(run(engine, [1, 2], SpecSettings(2))) == tokens(run(engine, [1, 2], None))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_seed_makes_the_draws_repeatable(engine: Engine, temperature: float) -> None:
    for spec in (None, SpecSettings(3), SpecSettings(3, 4, 12)):
        first, again, other = (
            tokens(run(engine, [1, 2], spec, temperature=temperature, top_p=0.95, seed=seed)) for seed in (7, 7, 8)
        )
        assert first == again != other


def test_bfloat16_speculation_differs_only_at_near_ties(folders: tuple[Path, Path]) -> None:
    engine = Engine.load(*folders, dtype="bfloat16", threads=1, max_context=400)
    for prompt in prompts(6, seed=9):
        plain, spec = (tokens(run(engine, prompt, s)) for s in (None, SpecSettings(3, 4, 12)))
        for place, (a, b) in enumerate(zip(plain, spec, strict=True)):
            if a != b:
                with torch.inference_mode():
                    engine.worker.target_cache.length = 0
                    seen = torch.tensor(prompt + plain[:place])
                    logits = engine.target.logits(engine.worker._prefill_target(seen, capture=False)[0])[0].float()
                assert abs(float(logits[a] - logits[b])) <= 0.02 * float(logits.abs().max())
                break
