"""Edits that leave real source's meaning alone leave the sites alone; a call that is gone is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transforms import EDITS, names_in_patterns, numbered, renaming, without_calls, written

import specmeter.eagle
from specmeter.recipes import loader
from specmeter.source.anchors import Refusal, Resolver

MODULE = "specmeter.eagle.worker"
SOURCE = (Path(specmeter.eagle.__file__).parent / "worker.py").read_bytes()
POINTS = [
    (point, anchor)
    for point in loader.built_in("specmeter").data["point"]
    for anchor in point["anchors"]
    if anchor["module"] == MODULE
]
EDIT_NAMES = [*EDITS, "rename"]


def _resolve(folder: Path, text: str, anchor: Mapping[str, Any], kind: str) -> Any:
    target = folder / "specmeter" / "eagle" / "worker.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return Resolver([str(folder)]).resolve(anchor, kind)


def _sites(folder: Path, text: str, numbers: Mapping[tuple[int, int, int, int], int]) -> list[list[int]]:
    target = folder / "specmeter" / "eagle" / "worker.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    resolver = Resolver([str(folder)])
    found = []
    for point, anchor in POINTS:
        outcome = resolver.resolve(anchor, point["kind"])
        assert not isinstance(outcome, Refusal), (point["name"], outcome)
        found.append([numbers[site.line, site.col, site.end_line, site.end_col] for site in outcome])
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    text, numbers = written(numbered(SOURCE), random.Random(0))
    return _sites(tmp_path_factory.mktemp("original"), text, numbers)


def test_there_is_something_to_test(original: list[list[int]]) -> None:
    assert len(original) >= 15
    assert len({number for sites in original for number in sites}) >= 15


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.sampled_from(EDIT_NAMES), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_harmless_edits_leave_the_sites(edits: list[str], seed: int, original: list[list[int]], tmp_path: Path) -> None:
    rng = random.Random(seed)
    rename = renaming(names_in_patterns([anchor for _, anchor in POINTS]))
    tree = numbered(SOURCE)
    for name in edits:
        tree = (EDITS.get(name) or rename)(tree, rng)
    text, numbers = written(tree, rng)
    assert _sites(tmp_path, text, numbers) == original


def test_a_call_that_is_gone_is_refused(original: list[list[int]], tmp_path: Path) -> None:
    checked = 0
    for (point, anchor), sites in zip(POINTS, original, strict=True):
        if point["kind"] != "call":
            continue
        text, _ = written(without_calls(numbered(SOURCE), set(sites)), random.Random(1))
        outcome = _resolve(tmp_path, text, anchor, "call")
        assert isinstance(outcome, Refusal), point["name"]
        assert "0 calls match" in outcome.reason
        checked += 1
    assert checked >= 12


def test_a_renamed_function_is_refused_with_its_new_name(tmp_path: Path) -> None:
    renamed = SOURCE.decode().replace("class Worker", "class ForkedWorker")
    point, anchor = POINTS[0]
    outcome = _resolve(tmp_path, renamed, anchor, point["kind"])
    assert isinstance(outcome, Refusal)
    assert f"Forked{anchor['function']}" in outcome.nearest
