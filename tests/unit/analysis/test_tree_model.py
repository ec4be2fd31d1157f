"""Trees from the draft's ranks: against the engine's own growth of trees, and through the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specmeter.analysis.costmodel_explain import evidence_of
from specmeter.analysis.costmodel_trees import Tree, likely_trees, tree_rows, why_not
from specmeter.analysis.tree_model import rank_acceptance, tree_length
from specmeter.cli import main
from specmeter.eagle.tree import DraftTree, TreeGrowth
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import load
from tests.support.cost_runs import Law, write_run
from tests.unit.analysis.test_explain import explained

PLACES = (0.5, 0.2, 0.1, 0.05)
RANKED = Law(accept=(0.5, 0.5, 0.5, 0.5), ranks=(0.4, 0.2, 0.1), noise=0.01)


def grown(steps: int, topk: int, tokens: int) -> DraftTree:
    """The engine's own tree where the draft's probabilities are the same at every place: token t is of place t + 1."""
    logits = torch.log(torch.tensor([*PLACES, *[0.01] * 15]))[None]
    growth = TreeGrowth(logits, torch.zeros(1, 1), torch.arange(19), topk)
    for _ in range(1, steps):
        growth.expand(logits.expand(topk, -1), torch.zeros(topk, 1))
    return growth.finish(-1, tokens)


def kept_on_average(tree: DraftTree, draws: int = 40_000) -> float:
    """Tokens a cycle where the target's token has each place as often as PLACES says, wherever it stands."""
    rng = np.random.default_rng(1)
    depth = max(tree.depths())
    drawn = rng.choice(len(PLACES) + 1, p=[*PLACES, 1 - sum(PLACES)], size=(draws, depth + 1))
    children = {(p, t): node for node, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    total = 0
    for row in drawn.tolist():
        node, at = 0, 0
        while (child := children.get((node, row[at]))) is not None:
            node, at = child, at + 1
        total += at + 1
    return total / draws


@pytest.mark.parametrize("shape", [(1, 4, 5), (2, 2, 7), (3, 4, 8), (3, 4, 20), (4, 3, 12)])
def test_the_length_is_that_of_the_engines_own_tree(shape: tuple[int, int, int]) -> None:
    accept = np.tile(np.array([*PLACES, *[0.0] * 12]), (4, 1))
    found = tree_length(accept, *shape)
    assert found.tokens == pytest.approx(kept_on_average(grown(*shape)), abs=0.02)
    assert found.low <= found.tokens <= found.high


def test_one_branch_is_the_chain_and_a_wider_tree_keeps_more() -> None:
    accept = np.tile(np.array(PLACES), (3, 1))
    chain = tree_length(accept, 3, 1, 4)
    assert chain.tokens == pytest.approx(1 + 0.5 + 0.25 + 0.125) and chain.low == chain.high == chain.tokens
    lengths = [tree_length(accept, 3, 4, n).tokens for n in (4, 6, 8, 16)]
    assert lengths == sorted(lengths) and lengths[0] >= chain.tokens
    with pytest.raises(SpecmeterError, match="up to 3 steps and 4 branches"):
        tree_length(accept, 4, 2, 8)


def test_shares_come_from_the_failures_and_lean_on_all_depths_where_they_are_few() -> None:
    missed = np.zeros((2, 4))
    missed[0] = [1000, 400, 200, 100]
    missed[1, 0] = 1  # one failure, and the place is beyond all
    found = rank_acceptance([0.6, 0.3], missed)
    assert found[0] == pytest.approx([0.6, 0.4 * 0.4, 0.4 * 0.2, 0.4 * 0.1], rel=0.01)
    assert found[1] == pytest.approx([0.3, 0.7 * 0.4, 0.7 * 0.2, 0.7 * 0.1], rel=0.06)
    with pytest.raises(SpecmeterError, match="ranks were not recorded"):
        rank_acceptance([0.6], np.zeros((1, 4)))


def test_a_tree_is_predicted_from_chains(tmp_path: Path) -> None:
    found = evidence_of([load(write_run(tmp_path / "run", RANKED, [0, 4], prompts=16, cycles=80, kind="sweep"))])
    tree = Tree(3, 4, 8)
    (row,) = tree_rows(found, [tree])
    truth = tree_length(np.tile(np.array([0.5, 0.2, 0.1, 0.05]), (3, 1)), 3, 4, 8)
    assert row.tokens.point == pytest.approx(truth.tokens, rel=0.03)
    assert row.tokens.low < truth.tokens < row.tokens.high
    # Verify of eight tokens, two further draft steps, whose growth by their rows is within the error.
    plain = RANKED.verify_ms(8) + RANKED.extend + RANKED.per_token * truth.tokens + 2 * RANKED.step + RANKED.output
    assert row.cycle_ms.low < plain < row.cycle_ms.high and row.cycle_ms.point == pytest.approx(plain, rel=0.05)
    assert row.speedup is not None and row.gain.low < row.gain.point < row.gain.high
    likely = likely_trees(found)
    assert likely and all(tree.tokens <= 10 and tree.steps <= 4 for tree in likely)


def test_the_command_shows_trees_asks_and_tries_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    law = Law(accept=(0.4, 0.4, 0.4, 0.4), ranks=(0.6, 0.2, 0.1), per_width=0.05, noise=0.01)
    path = str(write_run(tmp_path / "run", law, [0, 2, 4], prompts=12, cycles=60, kind="sweep"))
    result = explained(capsys, path, "--now", "2", "--what-if", "tree 3/4/8", "--what-if", "tree 7/2/9")
    rows = result["trees"]["rows"]
    assert 1 <= len(rows) <= 3 and not result["trees"]["reason"]
    speeds = [row["tokens_per_s"]["point"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    asked, deeper = result["what_if"]
    assert asked["here"]["gain"]["point"] > 1.05 and any("on average" in line for line in asked["assumptions"])
    assert deeper["here"] is None and "up to 4 steps" in deeper["reason"]
    action = next(a for a in result["actions"] if a["title"].startswith("a tree: "))
    best = rows[0]
    assert action["gain"] == best["gain"] and action["kind"] == "setting"
    words = f"--steps {best['steps']} --topk {best['topk']} --draft-tokens {best['draft_tokens']}"
    assert action["command"] == f"specmeter profile {words}"
    assert main(["explain", path, "--now", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Trees (steps/top-k/draft tokens), predicted" in text
    assert f"{best['steps']}/{best['topk']}/{best['draft_tokens']} " in text


@pytest.mark.parametrize("words", ["tree 3/1/4", "tree 2/2/64", "tree 0/2/2", "tree 3/4/1"])
def test_trees_that_cannot_be_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    path = str(write_run(tmp_path / "run", RANKED, [0, 3]))
    assert main(["explain", path, "--what-if", words]) == 2
    assert "cannot be grown" in capsys.readouterr().err


def test_without_ranks_no_tree_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", Law(), [0, 3])
    assert "of no failure" in why_not(evidence_of([load(path)]))
    result: dict[str, Any] = explained(capsys, str(path), "--what-if", "tree 3/4/8")
    assert result["trees"]["rows"] == [] and "ranks" in result["trees"]["reason"]
    assert result["what_if"][0]["here"] is None and "ranks" in result["what_if"][0]["reason"]
    few = write_run(tmp_path / "few", RANKED, [0, 3], prompts=2, cycles=12)
    assert "failures only" in why_not(evidence_of([load(few)]))
