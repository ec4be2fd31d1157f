"""Recipes: what is wrong with one is said, all of it, with the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes import loader
from specmeter.recipes.schema import problems

GOOD = """
schema = 1
engine = "fork"

[[versions]]
dist = ["fork"]
range = ">=1"

[[runner]]
name = "one"

[[point]]
name = "cycle"
role = "cycle"
kind = "body"
clock = "host"
required = true
anchors = [{ module = "fork.worker", function = "Worker.cycle" }]
[point.values]
batch = "arg0.reqs|len"
accepted = 'return["accepted"][0].n|sum'

[[point]]
name = "verify.forward"
role = "leaf"
kind = "call"
clock = "device"
required = false
runner = "one"
anchors = [{ module = "fork.worker", function = "Worker.cycle", call = "verify$", inside = "none", sites = 2 }]
"""


def _load(tmp_path: Path, text: str) -> loader.Recipe:
    path = tmp_path / "my.toml"
    path.write_text(text)
    return loader.load(path)


def _why(tmp_path: Path, text: str) -> str:
    with pytest.raises(SpecmeterError) as caught:
        _load(tmp_path, text)
    assert caught.value.exit is Exit.USAGE
    return caught.value.why


def test_a_good_one(tmp_path: Path) -> None:
    recipe = _load(tmp_path, GOOD)
    assert (recipe.engine, len(recipe.data["point"])) == ("fork", 2)


@pytest.mark.parametrize("engine", loader.built_in_engines())
def test_built_in_ones_are_valid_and_open_at_the_top(engine: str) -> None:
    recipe = loader.built_in(engine)
    assert problems(recipe.data) == []
    assert not any("<" in entry["range"] for entry in recipe.data["versions"][-1:])
    text = recipe.path.read_text()
    assert "line" not in {word for point in recipe.data["point"] for anchor in point["anchors"] for word in anchor}
    assert text.startswith("#")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema = 1", "schema = 2", "this specmeter reads schema 1"),
        ('role = "leaf"', 'role = "leave"', "line 23, point 2 (verify.forward): role = 'leave' is none of"),
        ('clock = "device"', 'clok = "device"', "unknown key 'clok' (did you mean 'clock'?)"),
        ('clock = "device"', "", "key 'clock' is missing"),
        ('name = "verify.forward"', 'name = "forward"', "a leaf is named phase.part"),
        ('name = "verify.forward"', 'name = "Verify"', "not well formed"),
        ('name = "verify.forward"', 'name = ["verify"]', "not well formed"),
        ('name = "verify.forward"', 'name = "cycle"', "role = 'leaf', but an earlier point of that name is 'cycle'"),
        ('call = "verify$"', 'call = "verify("', "is not a regular expression"),
        ('call = "verify$", ', "", "anchor 1: key 'call' is missing"),
        ('inside = "none"', 'inside = "loop"', "inside = 'loop' is none of for, while, with, none"),
        ("sites = 2", "sites = 0", "sites = 0 is not a count"),
        ("sites = 2", "sites = true", "sites = True is not a count"),
        ('runner = "one"', 'runner = "two"', "runner = 'two' is not declared: one"),
        ('range = ">=1"', 'range = "1.x"', "versions 1: range"),
        ('dist = ["fork"]', 'dist = "fork"', "dist is a list"),
        ('"arg0.reqs|len"', '"arg0.reqs()|len"', "values.batch"),
        ('"arg0.reqs|len"', '"__import__(1)"', "values.batch"),
        ('"arg0.reqs|len"', "7", "values.batch"),
        ('function = "Worker.cycle" }', 'function = "Worker.cycle", call = "x" }', "call means nothing"),
        ('role = "cycle"', 'role = "span"', "no point has role = 'cycle'"),
        ('module = "fork.worker"', 'module = "fork/worker"', "module = 'fork/worker' is not well formed"),
        ("required = true", 'required = "yes"', "required is true or false"),
        ("schema = 1", "schema = 1\nmodes = { decode = 2 }", "modes is a table of lists"),
    ],
)
def test_each_mistake_is_named_with_its_place(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert expected in _why(tmp_path, GOOD.replace(old, new, 1))


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    why = _why(tmp_path, GOOD.replace('role = "leaf"', 'role = "x"').replace("sites = 2", "sites = -1"))
    assert "role = 'x'" in why and "sites = -1" in why


def test_no_toml_and_no_file(tmp_path: Path) -> None:
    assert "line 1" in _why(tmp_path, "schema = = 1")
    with pytest.raises(SpecmeterError, match="cannot be read"):
        loader.load(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecmeterError, match="not TOML"):
        loader.load(tmp_path / "bytes.toml")


def test_an_engine_without_recipe() -> None:
    with pytest.raises(SpecmeterError) as caught:
        loader.built_in("tgi")
    assert "sglang" in caught.value.why
    assert loader.built_in("embedded").engine == "specmeter"
