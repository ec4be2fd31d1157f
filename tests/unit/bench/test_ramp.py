"""A ramp: streams that begin one after another, and what it and the ramp-down leave out of a level's figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specmeter.bench.client import Call, Outcome
from specmeter.bench.load import Load, LoadResult, drive, stream_start_s
from specmeter.bench.prompts import Prompt
from specmeter.bench.steady import steady_part, summarise_steady
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.hosts.far_load import Drive
from tests.unit.bench.test_client import DONE, HEAD, PROMPT, USAGE, _piece, _send, serving

MS = 1_000_000


def outcome(name: str, begun_ms: int, ended_ms: int, tokens: int = 10, error: str = "") -> Outcome:
    arrivals = tuple(begun_ms * MS + (ended_ms - begun_ms) * MS * (i + 1) // tokens for i in range(tokens))
    call = Call(name, Prompt("p", "chat", ({"role": "user", "content": "x"},)), tokens)
    return Outcome(call, begun_ms * MS, ended_ms * MS, arrivals, "x", 3, None, tokens, error=error)


# Two streams, the second from 100 ms on; the first runs out of work at 400 ms.
LOAD = [
    outcome("ramp", 0, 110), outcome("a", 100, 250), outcome("b", 110, 240), outcome("c", 240, 400),
    outcome("down", 250, 500),
]  # fmt: skip


def test_only_requests_that_ran_beside_all_streams_count() -> None:
    part = steady_part(LOAD, 100 * MS)
    assert [kept.call.request_id for kept in part.outcomes] == ["a", "b", "c"]
    assert (part.ramp, part.ramp_down, part.began_ns, part.ended_ns) == (1, 1, 100 * MS, 400 * MS)
    level: dict[str, Any] = summarise_steady(LoadResult(tuple(LOAD), 0.5, 0.0, 100 * MS), part, 0.1)
    assert level["left_out"] == {"ramp": 1, "ramp_down": 1} and level["requests"] == 5 and level["ramp_s"] == 0.1
    assert level["ttft_ms"]["n"] == 3 and level["wall_s"] == pytest.approx(0.3)
    # Whole: a, b and c; of `ramp` its last arrival (110 ms), of `down` those at 275 to 400 ms.
    assert level["total_tok_s"] == pytest.approx((30 + 1 + 6) / 0.3)


def test_a_load_that_ends_within_its_ramp_has_no_steady_part() -> None:
    level: dict[str, Any] = summarise_steady(LoadResult(tuple(LOAD), 0.5, 0.0, None), steady_part(LOAD, None), 9.0)
    assert level["left_out"] == {"ramp": 5, "ramp_down": 0} and level["total_tok_s"] is None
    assert level["ttft_ms"]["p50"] is None and level["requests"] == 5


def begin_here(url: str, calls: list[Call], load: Load) -> tuple[list[int], int | None, float]:
    found = drive(url, "m", calls, load)
    return sorted(one.send_ns for one in found.outcomes), found.full_ns, found.wall_s


def begin_far(url: str, calls: list[Call], load: Load) -> tuple[list[int], int | None, float]:
    heard: list[dict[str, Any]] = []
    request = {
        "url": url, "path": "/v1/chat/completions", "timeout_s": 10, "concurrency": load.concurrency,
        "stop_on_error": False, "ramp_s": load.ramp_s,
    }  # fmt: skip
    bodies = [json.dumps({"messages": []}).encode()] * len(calls)
    answer = Drive(request, bodies, lambda message, _: heard.append(message)).run()
    full_ns = answer["full_ns"]
    return sorted(m["send_ns"] for m in heard), None if full_ns is None else int(full_ns), float(answer["wall_s"] or 0)


@pytest.mark.parametrize("begin", [begin_here, begin_far])
def test_streams_begin_one_after_another(begin: Callable[..., tuple[list[int], int | None, float]]) -> None:
    assert [stream_start_s(number, 3, 0.6) for number in range(3)] == pytest.approx([0, 0.3, 0.6])
    calls = [Call(f"r{i}", PROMPT, 5) for i in range(3)]  # each answer takes longer than the ramp
    with serving(_send(HEAD, _piece("a"), USAGE + DONE, pause_s=0.4)) as url:
        sent, full_ns, _ = begin(url, calls, Load(3, ramp_s=0.3))
        assert sent[1] - sent[0] > 100 * MS and sent[2] - sent[0] > 250 * MS and full_ns is not None
        assert sent[1] < full_ns <= sent[2]
        # Work for one stream only: nobody waits for the end of the ramp.
        sent, full_ns, wall_s = begin(url, calls[:2], Load(2, ramp_s=60.0))
        assert full_ns is None and wall_s < 30 and len(sent) == 2


def test_a_ramp_that_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--ramp", "-1"], ["--ramp", "nan"], ["--ramp", "3", "--rate", "2"], ["--warmup", "-1"]):
        assert main(["bench", *words, "--out", str(tmp_path / "run")]) == 2
        assert words[0] in capsys.readouterr().err and not (tmp_path / "run").exists()
    with pytest.raises(SpecmeterError, match="ramp"):
        Load(2, rate=1.0, ramp_s=1.0)
