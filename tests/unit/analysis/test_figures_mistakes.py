"""Mistakes in files of figures and of shapes: always an error that names the place, never a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.analysis.costmodel_bytes import read_shape
from specmeter.analysis.costmodel_figures import read_figures
from specmeter.analysis.costmodel_reported import explain_figures
from specmeter.analysis.moe import Experts
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis

SERIES: dict[str, Any] = {"name": "s", "baseline_ms": 9.0, "experts": "128/8", "fit": [2, 5]}
STORY: dict[str, Any] = {"name": "s", "baseline_tok_s": 88.8, "verify_ms": [21.0, 28.0], "verify_share": 0.95}
ROWS: list[dict[str, Any]] = [
    {"steps": 2, "accept_length": 2.1, "tok_s": 150.0, "draft_tokens": 3, "best": True, "verify_factor": 0.7},
    {"steps": 5, "accept_length": 2.9, "tpot_ms": 6.0, "phases_ms": {"verify": 9.0}, "label": "five"},
    {"steps": 6, "accept_length": 3.0, "cycle_ms": 20.0},
]
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
         "vocab_size": 1000, "text_config": {"num_experts": 8, "num_experts_per_tok": 2}}  # fmt: skip


def toml(value: Any) -> str:
    """A value as TOML writes it inline."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def explained(path: Path, series: dict[str, Any], rows: Any) -> None:
    """Read, explained, printed, and as JSON."""
    path.write_text("[[series]]\n" + "".join(f"{key} = {toml(v)}\n" for key, v in {**series, "rows": rows}.items()))
    document = explain_figures(*read_figures(path))
    json.dumps(document, allow_nan=False)
    render_analysis(document)


def test_the_files_that_are_changed_below_are_understood(tmp_path: Path) -> None:
    for series in (SERIES, STORY):
        explained(tmp_path / "f.toml", series, ROWS)


@pytest.mark.parametrize(
    ("series", "row"),
    [
        ({"fit": [2, 2]}, {}), ({"fit": 5}, {}), ({"fit": [2, "5"]}, {}), ({"fit": [True, 2]}, {}),
        ({"verify_ms": 21}, {}), ({"verify_ms": [21]}, {}), ({"verify_ms": [28, 21]}, {}), ({"verify_share": 95}, {}),
        ({"experts": 128}, {}), ({"experts": "²/1"}, {}), ({"name": 5}, {}), ({}, {"phases_ms": 3}),
        ({}, {"phases_ms": {"verify": "x"}}), ({}, {"draft_tokens": "x"}), ({}, {"tok_s": float("nan")}),
        ({}, {"tok_s": float("inf")}), ({}, {"steps": True}), ({}, {"steps": 10**9}), ({}, {"cycle_ms": 10**400}),
        ({}, {"verify_factor": 0}), ({}, {"best": 1}), ({}, {"label": 3}),
    ],
)  # fmt: skip
def test_a_mistake_in_figures_is_named_with_a_next_step(
    tmp_path: Path, series: dict[str, Any], row: dict[str, Any]
) -> None:
    with pytest.raises(SpecmeterError) as caught:
        explained(tmp_path / "f.toml", {**SERIES, **series}, [ROWS[1], {**ROWS[0], **row}])
    assert caught.value.next_step


def test_a_story_without_any_speed_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match="no row has a speed"):
        explained(tmp_path / "f.toml", STORY, [{"steps": 2}, {"steps": 5}])


VALUES = st.one_of(
    st.integers(-3, 9), st.integers(10**9, 10**12), st.floats(), st.text(max_size=4), st.booleans(),
    st.lists(st.one_of(st.integers(-2, 7), st.floats(), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from(["verify", "draft"]), st.one_of(st.floats(), st.text(max_size=2)), max_size=2),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_file_of_figures_is_a_fault_of_ours(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    series = dict(data.draw(st.sampled_from([SERIES, STORY])))
    rows = [dict(row) for row in ROWS]
    for table in data.draw(st.lists(st.sampled_from([series, *rows]), min_size=1, max_size=3)):
        key = data.draw(st.sampled_from(sorted(table)))
        if data.draw(st.booleans()):
            table[key] = data.draw(VALUES)
        elif len(table) > 1:
            del table[key]
    kept = [row for row in rows if data.draw(st.integers(0, 4))]
    try:
        explained(tmp_path_factory.getbasetemp() / "figures.toml", series, kept)
    except SpecmeterError as error:
        assert error.what


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_shape_is_a_fault_of_ours(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    config = dict(SHAPE)
    for key in data.draw(st.lists(st.sampled_from(sorted(SHAPE)), min_size=1, max_size=3)):
        config[key] = data.draw(st.one_of(st.none(), VALUES))
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(config))
    try:
        read_shape(path)
    except SpecmeterError as error:
        assert error.what


def test_a_text_config_of_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SHAPE, "text_config": None}))
    assert read_shape(path).experts is None
    path.write_text(json.dumps(SHAPE))
    assert read_shape(path).experts == Experts(8, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"hidden_size": 1e999}', "beyond what a float holds"), ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "nested"),
        ('{"hidden_size": Infinity}', "no number of JSON"), ('{"vocab_size": ' + "9" * 5000 + "}", "beyond 64 bits"),
    ],
)  # fmt: skip
def test_a_shape_that_no_reader_could_take(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecmeterError) as caught:
        read_shape(tmp_path)
    assert "is not valid JSON" in caught.value.what and reason in caught.value.why


def test_a_shape_larger_than_any_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(SpecmeterError) as caught:
        read_shape(path)
    assert "larger than 16 MiB" in caught.value.why
