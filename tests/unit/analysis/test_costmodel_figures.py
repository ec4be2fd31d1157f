"""The published figures of docs/figures: predictions, break-even, and lines that cannot all be true."""

from __future__ import annotations

from pathlib import Path

import pytest

from specmeter.analysis.costmodel_figures import Series, predict_series, read_figures, slope_ms
from specmeter.analysis.costmodel_reported import explain_figures
from specmeter.analysis.costmodel_story import check_story
from specmeter.errors import SpecmeterError

FIGURES = Path(__file__).parents[3] / "docs" / "figures"


def series(name: str) -> dict[str, Series]:
    return {s.name: s for s in read_figures(FIGURES / f"{name}.toml")[1]}


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3"])
def test_two_step_counts_of_vllm_20780_predict_three_others_within_3_percent(name: str) -> None:
    found = {p.steps: p for p in predict_series(series("vllm-20780")[name])}
    for steps in (3, 4, 6):
        assert abs(found[steps].error_percent) < 3
        own = found[steps].own_error_percent
        assert own is not None and abs(own) < 3
    assert found[7].extrapolated and not found[4].extrapolated


def test_the_miss_at_seven_steps_of_eagle_3_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    found = {p.steps: p for p in predict_series(series("vllm-20780")["EAGLE-3"])}
    assert found[7].error_percent == pytest.approx(5.7, abs=0.1)


def test_a_step_of_eagle_3_is_dearer() -> None:
    both = series("vllm-20780")
    assert slope_ms(both["EAGLE-1"]) == pytest.approx(0.74, abs=0.005)
    assert slope_ms(both["EAGLE-3"]) == pytest.approx(1.02, abs=0.005)


def test_break_even_table() -> None:
    document = explain_figures(*read_figures(FIGURES / "break-even.toml"))
    even = {s["name"].split(":")[0]: [line["break_even_tokens"] for line in s["lines"]] for s in document["series"]}
    assert even["SpecForge 339"] == pytest.approx([2.59, 2.13, 2.92, 4.01], abs=0.005)
    assert even["vLLM 35387"] == pytest.approx([2.63, 3.96, 5.33], abs=0.006)
    assert even["vLLM 39680"] == pytest.approx([5.25], abs=0.006)
    assert even["SGLang 29960"] == [None, None]
    lines = {s["name"].split(":")[0]: s["lines"] for s in document["series"]}
    # Every report of a slowdown has an accept length below its break-even, and no other has.
    for name in ("SpecForge 339", "vLLM 35387", "vLLM 39680"):
        assert all(line["accept_length_tokens"] < line["break_even_tokens"] for line in lines[name])
    assert lines["SGLang 29960"][0]["phases_ms"]["in no named phase"] == pytest.approx(0.24)
    assert "baseline" in lines["SGLang 29960"][0]["reason"]
    assert lines["SpecForge 339"][2]["distinct_experts"] == pytest.approx(82.4, abs=0.1)


def test_the_story_implies_ranges_and_names_what_cannot_be_true() -> None:
    story = check_story(series("story")["the story"])
    ranges = {one.steps: one for one in story.implied}
    assert ranges[5].tokens == pytest.approx((1.569, 2.093), abs=0.001)
    assert ranges[10].tokens == pytest.approx((1.326, 1.768), abs=0.001)
    assert ranges[2].tokens == pytest.approx((1.545, 2.060), abs=0.001)
    for one in story.implied:
        assert one.together is not None and one.tokens[0] <= one.together[0] <= one.together[1] <= one.tokens[1]
    assert ranges[2].together[1] == ranges[10].tokens[1]  # type: ignore[index]
    assert ranges[10].together[0] == ranges[5].tokens[0]  # type: ignore[index]
    pairs = {frozenset(conflict.lines): conflict for conflict in story.conflicts}
    five_ten = pairs[frozenset({"5 steps", "10 steps"})]
    assert "18 %" in five_ten.would_need and five_ten.within_range
    best = pairs[frozenset({"5 steps", "2 steps, verify 27 % cheaper"})]
    assert "95.5" in best.why and "26 %" in best.would_need
    assert "10 steps" in story.measure_next[0] and "3, 6, 11" in story.measure_next[1]


def test_a_speed_that_no_chain_has(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(
        '[[series]]\nname = "s"\nverify_ms = [20, 21]\nverify_share = 1.0\nrows = [{ steps = 1, tok_s = 300 }]\n'
    )
    (one,) = check_story(read_figures(path)[1][0]).implied
    assert not one.possible


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "not valid TOML"),
        ("x = 1", r"no \[\[series\]\]"),
        ('[[series]]\nname = "s"\nrows = [{ tok_s = 3 }]', "needs steps|not understood"),
        ('[[series]]\nname = "s"\nrows = [{ steps = 3, tok_s = -3 }]', "above 0"),
        ('[[series]]\nname = "s"\nfit = [2, 9]\nrows = [{ steps = 2, tok_s = 3 }]', "two step counts"),
        ('[[series]]\nname = "s"\nsurprise = 1\nrows = []', "not understood"),
    ],
)
def test_a_file_that_is_not_understood(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(SpecmeterError, match=said):
        read_figures(path)
