"""Ranks and communication in the page and in text: the same sentences, and nothing that a host's name could inject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.collective_words import sentences_on
from specmeter.analysis.profile import analyse
from specmeter.reporters.html.ranks_section import collective_sections, rank_parts
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.build import load_rings
from specmeter.trace.synthetic_ranks import PLAN, Ranks, write_ranks


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """A profile of 20 ranks on two hosts; a clock's host with a name that is not one."""
    found = analyse(load_rings(write_ranks(tmp_path, Ranks(20, 2, 40, straggler=7, offset_ns=(0, 9))), PLAN), ())
    interval = {"low": 1.0, "point": 2.0, "high": 3.0, "level": 0.95, "method": "t", "n": 9, "unit": "cycle"}
    evil = "<b>x</b>\x1b[31m"
    phase = {
        "phase": "verify", "count": 61.0, "by_nccl": 0.0, "bytes": None, "ms": interval, "transfer_ms": 1.5,
        "waiting_ms": interval, "exposed_ms": 1.0, "busy_ms": 9.0, "percent": 22.2, "waiting_percent": 25.0,
        "skew_us": {"p50": 1.0, "p95": 2.0, "most": 3.0},
        "straggler": {"host": evil, "rank": 7, "percent": 90.0, "behind_ms": 0.25},
    }  # fmt: skip
    kind = {
        "phase": "verify", "operation": "all-reduce", "backend": evil, "count": 61.0, "bytes": 40960.0, "us": 9.0,
        "transfer_us": 8.0, "waiting_us": 1.0, "gb_s": 5.1,
    }  # fmt: skip
    ranks = [
        {
            "host": evil,
            "rank": rank,
            "device": "",
            "ms": 2.0,
            "waiting_ms": 0.1 * rank,
            "last_percent": 5.0,
            "clock": {},
        }
        for rank in range(20)
    ]
    found["collectives"] = {
        "setting": "", "cycles": 38, "left_out": 1, "phases": [phase], "kinds": [kind], "ranks": ranks,
        "sentences": ["Communication is 22 % of verify."], "notes": [f"the clock of {evil} is wrong"], "others": [],
    }  # fmt: skip
    return found


def test_the_page_and_the_text_say_the_same_and_both_are_inert(document: dict[str, Any]) -> None:
    page = "".join(part.as_html() for part in collective_sections(document)) + "".join(rank_parts(document, []))
    text = render_analysis(document, width=120)
    for words in (
        "Communication is 22 % of verify.",
        "Rank 7 is the straggler",
        "verify rank 7",
        "and 4 more",
        "40960",
    ):
        assert words in page and words in text, words
    assert "<b>" not in page and "\x1b" not in page + text
    assert text.count("on host") >= 16 and "20 ranks" not in text


def test_a_profile_without_windows_has_no_section(document: dict[str, Any]) -> None:
    del document["collectives"]
    assert collective_sections(document) == [] and "Communication" not in render_analysis(document, width=100)
    assert sentences_on([], 1) == ()
