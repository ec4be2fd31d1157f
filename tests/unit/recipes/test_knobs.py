"""Knobs of a recipe: what is wrong with one, and when a plan has it."""

from __future__ import annotations

import marshal
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from test_recipe_schema import GOOD

from specmeter.recipes import loader
from specmeter.recipes.planner import build_plan
from specmeter.recipes.schema import problems
from tests.support.recipes import cycle, install, point, recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORKER = """class Worker:
    def cycle(self, batch):
        self.table = make_table(3)
        return self.verify(batch), self.send(steps=self.table[1])
"""
KNOB = """
[[knob]]
name = "steps"
point = "verify.forward"
path = "self.pool.table"
shape = "each"
low = 0
most = "self.most"
needs = [
  { module = "fork.worker", function = "Worker.cycle", call = 'make_table' },
  { module = "fork.worker", function = "Worker.cycle", call = 'send$', args = 'steps=' },
]
"""
POINT = point("verify.forward", "fork.worker", "Worker.cycle", required=False, call=r"^self\.verify$")
RECIPE = recipe(cycle("fork.worker", "Worker.cycle", required=False), engine="fork", dist="fork", range="")


def plan(folder: Path, recipe: str, source: str = WORKER, **options: Any) -> Any:
    """The plan of a made-up engine of that source."""
    install(folder / "tree", "fork", {"worker": source})
    path = folder / "my.toml"
    path.write_text(recipe)
    env = {**os.environ, "PYTHONPATH": str(folder / "tree")}
    return build_plan(Path(sys.executable), recipe=path, env=env, **options)


def test_a_knob_is_in_the_plan_and_opened_on_demand_only(tmp_path: Path) -> None:
    for name, knobs in (("closed", ()), ("open", ("steps",))):
        planned = plan(tmp_path / name, RECIPE + POINT + KNOB, knobs=knobs)
        [knob] = planned.plan["knobs"]
        [point] = [p for p in planned.plan["points"] if p["name"] == "verify.forward"]
        assert (knob["points"], knob["open"], knob["most"]) == ([point["id"]], bool(knobs), "self.most")
        assert point.get("knob_paths", []) == (["self.pool.table", "self.most"] if knobs else [])
        roots = marshal.loads(planned.code["fork.worker"])["roots"][point["id"]]
        assert roots == ([["self", 0]] if knobs else [])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("make_table(3)", "[0, 3]", "0 calls match 'make_table', not 1"),
        ("steps=self.table[1]", "count=2", "0 calls match 'send$', not 1"),
        ("self.verify(batch)", "batch", "its point verify.forward is not there"),
    ],
)
def test_a_version_without_the_reads_refuses_the_knob_with_the_reason(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    found = plan(tmp_path, RECIPE + POINT + KNOB, WORKER.replace(old, new), knobs=("steps",)).plan
    assert found["knobs"] == []
    assert [(item["name"], item["reason"]) for item in found["knobs_refused"]] == [("steps", reason)]


def test_a_version_outside_the_range_refuses_it(tmp_path: Path) -> None:
    found = plan(tmp_path, RECIPE + POINT + KNOB.replace("low = 0", 'low = 0\nrange = ">=2"')).plan
    assert "it is not for version 1.5 (>=2)" in found["knobs_refused"][0]["reason"]


def test_a_plan_of_the_knobs_points_alone(tmp_path: Path) -> None:
    found = plan(tmp_path, RECIPE + POINT + KNOB, knobs=("steps",), only=["verify.forward"]).plan
    assert [point["name"] for point in found["points"]] == ["verify.forward"]
    assert found["knobs"][0]["open"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('path = "self.pool.table"', 'path = "self.pool.table|len"', "path ="),
        ('path = "self.pool.table"', 'path = "self"', "path ="),
        ('path = "self.pool.table"', 'path = "return.table"', "path ="),
        ('shape = "each"', 'shape = "all"', "none of each, int"),
        ('point = "verify.forward"', 'point = "verify.other"', "is no point of this recipe"),
        ("low = 0", "low = 0.5", "low = 0.5 is not a whole number"),
        ('most = "self.most"', 'most = "max()"', "most ="),
        ("needs = [", "needs = []\nunused = [", "nothing under needs"),
        ("call = 'make_table'", "call = '('", "not a regular expression"),
    ],
)
def test_what_is_wrong_with_a_knob_is_said(old: str, new: str, words: str) -> None:
    text = RECIPE + POINT + KNOB
    assert problems(tomllib.loads(text)) == []
    assert old in text
    found = problems(tomllib.loads(text.replace(old, new)))
    assert any(where.startswith("knob 1") and words in what for where, what in found), found


def test_a_knob_with_numbers_to_choose_from_and_a_count_of_ranks_hands_over_what_leads_there(tmp_path: Path) -> None:
    chosen = KNOB.replace('low = 0\nmost = "self.most"', 'among = "self.pool.all"\nalone = ["self.ranks"]')
    found = plan(tmp_path, RECIPE + POINT + chosen, knobs=("steps",)).plan
    [point] = [p for p in found["points"] if p["name"] == "verify.forward"]
    assert point["knob_paths"] == ["self.pool.table", "self.pool.all", "self.ranks"]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ('among = "self.all"\nlow = 0', "low means nothing beside among"),
        ('among = "self"', "among = 'self'"),
        ("low = 0", "key 'most' is missing"),
        ('low = 0\nmost = 3\nalone = "self.ranks"', "no list of paths"),
        ('low = 0\nmost = 3\nalone = ["ranks()"]', "no list of paths"),
    ],
)
def test_what_is_wrong_with_its_limits_is_said(limits: str, words: str) -> None:
    text = RECIPE + POINT + KNOB.replace('low = 0\nmost = "self.most"', limits)
    assert any(words in what for _, what in problems(tomllib.loads(text))), problems(tomllib.loads(text))


def test_the_engines_recipes_have_the_number_of_draft_steps_and_the_example_has_none() -> None:
    for engine in ("vllm", "sglang"):
        assert [knob["name"] for knob in loader.built_in(engine).data["knob"]] == ["draft_steps"]
    assert "knob" not in tomllib.loads(GOOD)
