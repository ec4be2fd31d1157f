"""Numbers that make no sense are refused before a server is started or a run directory made."""

from __future__ import annotations

from pathlib import Path

import pytest

import specmeter.engines.server
from specmeter.cli import main

BAD = {
    "profile --temperature nan": "--temperature is nan",
    "profile --temperature -1": "--temperature is -1",
    "profile --temperature inf": "--temperature is inf",
    "bench --temperature nan": "--temperature is nan",
    "demo --temperature nan": "--temperature is nan",
    "bench --concurrency ²": "is no list of numbers",
    "tune --trial-timeout nan": "--trial-timeout nan",
    "tune --trial-timeout inf": "--trial-timeout inf",
    "bench --seed 9007199254740993": "--seed 900719925474... is too large",
    "sweep --seed -18446744073709551616": "--seed -18446744073... is too large",
    "bench --requests 99999999999": "--requests is 99999999999",
    "bench --warmup 99999999999": "--warmup is 99999999999",
    "sweep --blocks 99999999999": "--blocks is 99999999999",
    "sweep --starts 99999999999": "--starts is 99999999999",
    "compare --blocks 99999999999": "--blocks is 99999999999",
    "compare --starts 99999999999": "--starts is 99999999999",
    "compare --concurrency 0": "--concurrency is 0",
    "profile --steps 99": "speculative_num_steps = 99",
    "profile --steps -2": "steps is -2",
    "profile --steps 3 --topk 99": "speculative_eagle_topk = 99",
    "profile --start-timeout 0": "--start-timeout is 0",
    "bench --start-timeout nan": "--start-timeout is nan",
    "sweep --steps 5-1": "runs backwards: 5-1",
    "sweep --steps 0": "nothing to sweep",
    "sweep --steps ,": "nothing to sweep",
    "sweep --steps 1-40": "speculative_num_steps = 17",
    "sweep --steps 1-999999999": "more than 64",
    "sweep --steps ²": "is no list of numbers",
    "sweep --steps 1-²": "is no list of numbers",
    "sweep --steps 1-99999999999999999999": "is no list of numbers",
    "compare --arm steps=²": "is no setting",
}


@pytest.mark.parametrize("words", BAD)
def test_a_senseless_number_starts_nothing(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(specmeter.engines.server, "ServerProcess", lambda *given: started.append(given))
    # A model directory is named so that none is fetched.
    assert main([*words.split(), "--model", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert BAD[words] in shown.err and not started
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    ["sweep --steps 8 10", "sweep --steps 8, 10 -- vllm serve m", "bench --concurrency 1 4,16", "sweep --steps 1 2-4"],
)
def test_a_list_written_with_spaces_is_told_of_commas(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert "list of numbers with commas, as 8,10" in shown and "engine" not in shown
    assert not list(tmp_path.iterdir())


def test_steps_beyond_any_engine_are_refused_for_other_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--steps", "99", "--", "vllm", "serve", "m"]) == 2
    assert "99 draft steps" in capsys.readouterr().err and not list(tmp_path.iterdir())
