"""Comparison documents from made-up requests whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from specmeter.analysis.compare import ACROSS, ArmFacts, analyse_compare, block_logs
from specmeter.analysis.starts import blocks_to_decide, drift_in_starts, spread, starts_to_decide
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request

PROMPTS = {"a": 1.0, "b": 0.5}


def _request(arm: str, start: int, block: int, prompt: str, rate: float, error: str = "") -> Request:
    tokens = 101
    begin = (start * 100 + block) * 10**9
    return Request(
        f"{arm}-{start}-{block}-{prompt}", prompt, arm, block, begin, begin + 10**6,
        begin + 10**6 + int(1e9 * (tokens - 1) / rate), 10, tokens, error, start,
    )  # fmt: skip


def _session(speeds: dict[str, float], starts: int, sd: float, together: bool = False, seed: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    found: list[Request] = []
    place = 0
    for _ in range(starts):
        for arm in speeds:
            effect = math.exp(sd * rng.normal())
            for block in range(4):
                slow = 0.5 if block == 0 else math.exp(0.002 * rng.normal())
                for prompt, content in PROMPTS.items():
                    found.append(_request(arm, place, block, prompt, speeds[arm] * content * effect * slow))
            place += not together
        place += together
    return found


def _document(speeds: dict[str, float], starts: int, sd: float, together: bool = False) -> dict:
    return analyse_compare([ArmFacts(arm) for arm in speeds], _session(speeds, starts, sd, together), 0.01)


def test_a_clear_difference_is_found_and_the_first_block_does_not_count() -> None:
    document = _document({"base": 50.0, "k=2": 60.0}, 3, 0.005)
    (row,) = document["pairs"]
    assert row["verdict"] == "faster" and row["ratio"]["low"] < 1.2 < row["ratio"]["high"]
    assert document["arms"][0]["starts"] == 3 and document["arms"][0]["blocks"] == 9
    rate = document["arms"][0]["tokens_per_s"]["point"]
    assert rate == pytest.approx(50 * math.sqrt(0.5), rel=0.02)
    assert "faster than base" in render_analysis(document)


def test_two_starts_a_side_never_decide() -> None:
    document = _document({"base": 50.0, "k=2": 90.0}, 2, 0.001)
    (row,) = document["pairs"]
    assert row["verdict"] == ACROSS == document["verdict"]["word"] and row["starts_to_decide"] == 3
    assert ACROSS in render_analysis(document)


def test_a_small_difference_says_how_many_starts_would_decide() -> None:
    document = _document({"base": 50.0, "k=2": 52.5}, 3, 0.03)
    (row,) = document["pairs"]
    assert row["verdict"] == "inconclusive"
    more = row["starts_to_decide"]
    assert more is not None and more > 3
    again = _document({"base": 50.0, "k=2": 52.5}, 4 * more, 0.03)
    assert again["pairs"][0]["verdict"] == "faster"


def test_arms_in_one_start_cancel_its_speed_and_one_start_is_not_proof() -> None:
    document = _document({"base": 50.0, "k=2": 52.5}, 1, 0.0, together=True)
    (row,) = document["pairs"]
    assert row["paired_in_start"] and row["verdict"] == ACROSS and row["ratio"]["unit"] == "block"
    assert row["ratio"]["low"] < 1.05 < row["ratio"]["high"]
    document = _document({"base": 50.0, "k=2": 52.5}, 3, 0.0, together=True)
    assert document["pairs"][0]["verdict"] == "faster" and document["pairs"][0]["ratio"]["unit"] == "server start"


def test_a_block_with_a_failed_request_is_left_out() -> None:
    requests = _session({"base": 50.0}, 1, 0.0)
    requests[-1] = _request("base", 0, 3, "b", 25.0, error="HTTP 500")
    assert sorted(block_logs(requests)[0]) == [1, 2]


def test_an_arm_that_always_lacks_a_prompt_is_not_compared_on_others() -> None:
    made = [
        _request(arm, start, block, prompt, rate, "it failed" if (arm, prompt) == ("b", "slow") else "")
        for start, arm in enumerate(["a", "b"] * 3)
        for block in range(3)
        for prompt, rate in (("slow", 10.0), ("fast", 100.0))
    ]
    (pair,) = analyse_compare([ArmFacts("a"), ArmFacts("b")], made, 0.01)["pairs"]
    assert pair["ratio"] is None and "no whole block" in pair["reason"]


def test_several_arms_name_the_best() -> None:
    document = _document({"base": 50.0, "k=1": 55.0, "k=2": 60.0, "k=6": 40.0}, 4, 0.004)
    assert document["verdict"]["word"] == "faster" and "k=2" in document["verdict"]["sentence"]
    slow = _document({"base": 50.0, "k=5": 40.0, "k=6": 30.0}, 4, 0.004)
    assert slow["verdict"]["sentence"] == "base is faster than every other arm."


def test_variance_components_are_recovered() -> None:
    rng = np.random.default_rng(3)
    arms = [[0.04 * rng.normal() + 0.02 * rng.normal(size=5) for _ in range(400)]]
    found = spread(arms)
    assert found is not None
    assert math.sqrt(found.start) == pytest.approx(0.04, rel=0.1) and math.sqrt(found.block) == pytest.approx(
        0.02, rel=0.1
    )
    assert spread([[np.zeros(3)], [np.zeros(3)]]) is None


def test_what_would_decide() -> None:
    assert starts_to_decide(math.log(1.005), 1e-4, 3, 0.01, False) is None  # within the threshold
    few = starts_to_decide(math.log(1.10), 4e-4, 3, 0.01, False)
    many = starts_to_decide(math.log(1.03), 4e-4, 3, 0.01, False)
    assert few is not None and many is not None and few < many
    parts = spread(
        [[np.array([0.0, 0.1, -0.1, 0.0]), np.array([0.0, -0.1, 0.1, 0.0]), np.array([0.1, 0.0, -0.1, 0.0])]]
    )
    assert parts is not None and parts.start == 0
    more, less = (blocks_to_decide(math.log(r), parts, 3, 0.01, False) for r in (1.05, 1.2))
    assert more is not None and less is not None and more > less


def test_drift_within_starts_is_seen() -> None:
    rng = np.random.default_rng(0)
    steady = [0.01 * rng.normal(size=8) + i for i in range(4)]
    drifting = [row - 0.02 * np.arange(8) for row in steady]
    flat, found = drift_in_starts(steady), drift_in_starts(drifting)
    assert flat is not None and flat.p_value > 0.05
    assert found is not None and found.p_value < 1e-3 and found.percent == pytest.approx(-13, abs=2)


def test_one_start_a_side_gives_the_plain_ratio_and_no_interval() -> None:
    document = _document({"base": 50.0, "k=2": 60.0}, 1, 0.0)
    ratio = document["pairs"][0]["ratio"]
    assert ratio["point"] == pytest.approx(1.2, rel=0.01) and ratio["high"] is None


def _without(requests: list[Request], arm: str, start: int, blocks: set[int]) -> list[Request]:
    """The same with a failed request in each of these blocks of an arm."""
    return [
        replace(r, error="gone") if (r.setting, r.start, r.prompt_id) == (arm, start, "a") and r.block in blocks else r
        for r in requests
    ]


def test_starts_whose_whole_blocks_are_not_shared_give_no_ratio_and_say_why() -> None:
    requests = _session({"base": 50.0, "k=2": 60.0}, 3, 0.0, together=True)
    for start in range(3):
        requests = _without(_without(requests, "base", start, {1, 2}), "k=2", start, {3})
    document = analyse_compare([ArmFacts("base"), ArmFacts("k=2")], requests, 0.01)
    (row,) = document["pairs"]
    assert (row["ratio"], row["verdict"]) == (None, "inconclusive") and "whole on both sides" in row["reason"]
    assert "could not be compared" in render_analysis(document)


def test_one_start_left_of_three_is_no_proof() -> None:
    requests = _session({"base": 50.0, "k=2": 90.0}, 3, 0.0, together=True)
    for start in range(2):
        requests = _without(_without(requests, "base", start, {1, 2}), "k=2", start, {3})
    document = analyse_compare([ArmFacts("base"), ArmFacts("k=2")], requests, 0.01)
    (row,) = document["pairs"]
    assert (row["ratio"]["unit"], row["ratio"]["n"], row["verdict"]) == ("block", 3, ACROSS)
    assert "1 of at least 3 starts" in row["reason"] and document["verdict"]["word"] == ACROSS
