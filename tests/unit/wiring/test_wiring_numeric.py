"""The numeric check on small models: its acceptance is the engine's own, and it says so when it cannot decide."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.linear import PLAIN_FLOAT32
from specmeter.wiring.measure import Acceptance, SoftLoss, acceptance, fuse, in_errors
from specmeter.wiring.numeric import Bench, Text, Unroller, load, prepare, with_normed_residual
from specmeter.wiring.probe import Wiring, neighbours, probe_findings, run_probe
from specmeter.wiring.scan import run_scan, starts
from tests.support.tiny_eagle import CAPTURE, LAYERS, VOCAB, write_head, write_target

STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_target(folder / "target"), write_head(folder / "head")


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    return Engine.load(*folders, dtype="float32", threads=1, max_context=256)


@pytest.fixture(scope="module")
def text(engine: Engine) -> Text:
    draw = random.Random(3)
    sequences, begins = [], []
    for _ in range(6):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 12))]
        answer = [t for cycle in engine.generate(prompt, Sampling(max_tokens=40)) for t in cycle.token_ids]
        sequences.append((*prompt, *answer))
        begins.append(len(prompt) - 1)
    return Text(tuple(sequences), tuple(begins))


def bench_of(folders: tuple[Path, Path], text: Text, monkeypatch: pytest.MonkeyPatch) -> Bench:
    # The tiny models' ties are broken by rounding, so both sides must compute in the same type.
    monkeypatch.setattr("specmeter.wiring.numeric.choose_layout", lambda name: PLAIN_FLOAT32)
    return prepare(*load(*folders, len(CAPTURE), threads=1), text)


@pytest.fixture
def bench(folders: tuple[Path, Path], text: Text, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return bench_of(folders, text, monkeypatch)


def test_rows_accept_what_the_engine_accepts_cycle_by_cycle(bench: Bench, engine: Engine, text: Text) -> None:
    counts = Unroller(bench, STEPS).accepted(fuse(bench, CAPTURE), bench.head.target_ids).tolist()
    offset, compared, seen = 0, 0, set()
    for sequence, start in zip(text.sequences, text.starts, strict=True):
        cycles = list(engine.generate(sequence[: start + 1], Sampling(max_tokens=40), SpecSettings(STEPS)))[1:]
        row = start
        for cycle in cycles:
            if row + STEPS + 1 >= len(sequence):
                break
            assert counts[offset + row] == cycle.accepted
            seen.add(cycle.accepted)
            compared += 1
            row += cycle.accepted + 1
        offset += len(sequence)
    assert compared > 50 and len(seen) > 2


def test_another_wiring_accepts_otherwise(bench: Bench) -> None:
    unroller = Unroller(bench, STEPS)
    right = acceptance(unroller, fuse(bench, CAPTURE))
    wrong = acceptance(unroller, fuse(bench, [3, 1, 0]))
    assert right.accept_length() > wrong.accept_length() + 0.2
    shares = right.per_position()
    assert shares[0] >= shares[1] >= shares[2] > 0


def test_accept_length_is_counted_over_cycles_and_not_over_sequence_ends() -> None:
    counts, line = torch.tensor([2, 0, 0, 3, 0, 3, 0, 0]), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    # Cycles start at rows 0 (gains 3), 3 (4, over the end of its sequence) and 5 (4).
    assert Acceptance(counts, line, 3).accept_length() == pytest.approx((3 + 4 + 4) / 3)


def test_the_soft_loss_prefers_the_right_wiring(bench: Bench) -> None:
    loss = SoftLoss(bench, Unroller(bench, 1))
    assert in_errors(loss.of(fuse(bench, [0, 1, 2])) - loss.of(fuse(bench, CAPTURE))) > 3


def test_neighbours_cover_the_common_mistakes() -> None:
    made = list(neighbours(Wiring((3, 16, 28)), 30))
    states = {wiring.states for wiring in made}
    shifted = {(2, 15, 27), (4, 17, 29)}
    shifted |= {(2, 16, 28), (4, 16, 28), (3, 15, 28), (3, 17, 28), (3, 16, 27), (3, 16, 29)}
    embedding, order = {(0, 16, 28)}, {(28, 16, 3), (16, 3, 28), (3, 28, 16)}
    assert states == {(3, 16, 28)} | shifted | embedding | order
    others = [w for w in made if w.states == (3, 16, 28)]
    assert [(w.normalise, w.normed_residual, w.map_ignored) for w in others] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert (1, 16, 28) in {wiring.states for wiring in neighbours(Wiring((0, 16, 28)), 30)}
    # What the head's config asks for holds for every neighbour but the one that switches it.
    normed = [w.normed_residual for w in neighbours(Wiring((3, 16, 28), normed_residual=True), 30)]
    assert normed.count(False) == 1


def test_neighbours_stay_inside_the_target() -> None:
    made = list(neighbours(Wiring((0, 16, 30)), 30))
    assert all(0 <= k <= 30 for wiring in made for k in wiring.states)
    assert not [wiring for wiring in made if wiring.change.startswith("every state")]


def test_a_probe_under_a_wrong_wiring_names_the_better_one(bench: Bench) -> None:
    probe = run_probe(bench, "toy 1.0", Wiring((0, 1, 2)))
    better = probe.better()
    assert better is not None and better.wiring.states[-1] == LAYERS
    assert [f.id for f in probe_findings(probe)] == ["probe-better-neighbour"]
    right = run_probe(bench, "toy 1.0", Wiring(tuple(CAPTURE)))
    # Two of this head's three states are noise to it, so only the third can be wrong.
    assert right.base.result.accept_length() > probe.base.result.accept_length() + 0.2
    assert all(m.wiring.states[-1] == LAYERS for m in right.neighbours if m.gain > 3)


def test_the_normed_residual_is_the_one_of_engines_that_know_the_option(bench: Bench) -> None:
    """The layer by hand, as vLLM's class has it: residual = hidden_norm(hidden) in place of hidden."""
    hidden = fuse(bench, CAPTURE)
    plain, normed = Unroller(bench, 1), Unroller(with_normed_residual(bench), 1)
    given = bench.head.hidden_norm(hidden)
    assert not torch.allclose(plain.first(hidden), normed.first(hidden))
    # The attention sees the same input either way, so the sum before the MLP differs by the residuals' difference.
    seen: list[torch.Tensor] = []
    for unroller in (plain, normed):
        head, mlp_norm = unroller.bench.head, unroller.bench.head.mlp_norm
        head.mlp_norm = lambda x, norm=mlp_norm: seen.append(x.clone()) or norm(x)  # type: ignore[assignment, func-returns-value]
        unroller.first(hidden)
        head.mlp_norm = mlp_norm
    assert torch.allclose(seen[1] - seen[0], given - hidden, atol=1e-4)


def test_a_scan_finds_the_state_that_matters_and_says_that_the_others_do_not(bench: Bench) -> None:
    scan = run_scan(bench, list, lambda text: None)
    assert scan.best[-1] == LAYERS
    assert scan.states is None and "could as well be two layers away" in scan.reason
    assert scan.combinations == (LAYERS + 1) ** 3


def test_a_scan_of_a_random_head_is_not_decidable(
    folders: tuple[Path, Path], text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders[1], tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(9)
    for name in ("fc.weight", "lm_head.weight"):
        tensors[name] = torch.randn(tensors[name].shape, generator=generator) * 0.2
    save_file(tensors, path)
    scan = run_scan(bench_of((folders[0], tmp_path / "head"), text, monkeypatch), list, lambda text: None)
    assert scan.states is None and "no wiring makes it draft" in scan.reason
    assert not scan.certain


def test_starts_suit_any_number_of_states() -> None:
    assert starts(3, 30)[0] == (2, 15, 27)
    assert starts(5, 36)[0] == (6, 12, 18, 24, 30)
    assert all(len(start) == 2 for start in starts(2, 8))


def test_a_bench_keeps_sequences_apart(bench: Bench, folders: tuple[Path, Path], text: Text) -> None:
    whole = Unroller(bench, STEPS).accepted(fuse(bench, CAPTURE), bench.head.target_ids)
    alone = Text(text.sequences[2:3], text.starts[2:3])
    single = prepare(bench.target, bench.head, alone)
    counts = Unroller(single, STEPS).accepted(fuse(single, CAPTURE), single.head.target_ids)
    assert torch.equal(counts, whole[bench.line == 2])
    assert replace(alone).starts == text.starts[2:3]
