"""The command on run directories: what-ifs in words, three actions with commands, and what it cannot say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from specmeter.cli import main
from specmeter.commands.explain_commands import PLACE, ServerCommands
from tests.support.cost_runs import Law, write_run


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["explain", "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return result


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", Law(), [0, 2, 5], kind="sweep", prompts=12)


def test_three_actions_with_gain_error_and_a_command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = explained(capsys, str(run_dir), "--now", "2")
    assert len(result["actions"]) == 3
    cautious = [action["gain"]["point"] + action["gain"]["low"] for action in result["actions"]]
    assert cautious == sorted(cautious, reverse=True)
    assert all(action["gain"]["point"] > 1 for action in result["actions"])
    for action in result["actions"]:
        assert action["gain"]["low"] <= action["gain"]["point"] <= action["gain"]["high"]
        assert shlex.split(action["command"])[0] == "specmeter"
    best = result["best_steps"]
    steps = next(action for action in result["actions"] if action["title"] == f"{best} draft steps instead of 2")
    assert steps["command"] == f"specmeter profile --steps {best}"


def test_three_actions_also_where_little_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server seen at its own step count alone, without a baseline: step counts within the error fill the three."""
    law = Law(accept=(0.6, 0.4), noise=0.1)
    line = ["specmeter", "explain", "--live", "--link", "x", "--url", "u"]
    path = write_run(tmp_path / "run", law, [2], command=line)
    result = explained(capsys, str(path))
    assert len(result["actions"]) == 3
    filled = [action for action in result["actions"] if action["gain"]["point"] <= 1.002]
    assert filled and filled == result["actions"][-len(filled) :]
    for action in filled:
        assert "instead of 2" in action["title"] and action["gain"]["high"] > 1 and "--steps" in action["command"]


def test_speculation_that_does_not_pay_is_to_be_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    law = Law(accept=(0.1, 0.1, 0.1, 0.1), step=5.0)
    path = write_run(tmp_path / "run", law, [0, 3])
    result = explained(capsys, str(path))
    assert "does not pay" in result["sentence"] and result["best_steps"] == 0
    said = "Speculation should be off: no step count is predicted faster than plain decoding, "
    assert result["sentence"].startswith(said) and "(the best, 1 draft step, gives " in result["sentence"]
    assert not any("instead of" in action["title"] for action in result["actions"])
    assert main(["explain", str(path), "--what-if", "draft 10 % faster"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "faster than every step count above" in text and "plain decoding would still be faster" in text
    assert " best " not in text.partition("Draft steps")[2].partition("m measured")[0]
    off = next(action for action in result["actions"] if action["title"] == "speculation off")
    truth = 1 / law.cycle_ms(0) / (law.tokens(3) / law.cycle_ms(3))
    assert off["gain"]["point"] == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("ends", [(1.177, 1.44, 1.757), (0.6, 0.7, 0.8), (0.9, 1.05, 1.2)])
def test_what_a_sweep_measured_comes_before_what_is_modelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: tuple[float, float, float]
) -> None:
    law = Law(accept=(0.25, 0.25), step=2.0, noise=0.2)
    path = write_run(tmp_path / "run", law, [0, 2], kind="sweep")
    modelled = explained(capsys, str(path))
    assert modelled["measured"] is None and "easured" not in modelled["sentence"]
    ratio = {
        **dict(zip(("low", "point", "high"), ends, strict=True)),
        "level": 0.95,
        "method": "t",
        "n": 8,
        "unit": "u",
    }
    arms = [{"setting": "k=2", "settings": {"steps": 2, "topk": 1, "draft_tokens": 3}, "ratio": ratio}]
    path = write_run(tmp_path / "rated", law, [0, 2], kind="sweep", changes={"arms": arms})
    result = explained(capsys, str(path))
    assert result["measured"]["ratio"]["point"] == ends[1] and result["measured"]["run"] == str(path)
    first, _, rest = result["sentence"].partition(" Modelled: ")
    if ends[0] > 1:
        assert first == "Measured: 2 draft steps are 44 % faster than plain decoding [+18, +76 %]."
        assert "Speculation should be off" not in rest and "At present speculation does not pay" not in rest
        assert "Whether speculation pays" not in rest
    elif ends[2] < 1:
        assert first == "Measured: 2 draft steps are 30 % slower than plain decoding [-40, -20 %]."
        assert "At present speculation pays" not in rest and "Whether speculation pays" not in rest
    else:
        assert first.endswith("+5 % [-10, +20 %], not told apart.") and rest == modelled["sentence"]
    assert main(["explain", str(path)]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(first)


def test_far_from_paying_is_said_without_doubt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = explained(capsys, str(write_run(tmp_path / "run", Law(accept=(0.1, 0.1), extend=9.0), [0, 2])))
    said = "Speculation should be off: every step count is predicted slower than plain decoding, "
    assert result["sentence"].startswith(said) and result["actions"][0]["title"] == "speculation off"


def test_one_step_is_no_plural_and_the_means_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", Law(accept=(0.7, 0.05, 0.05)), [0, 1, 2], kind="sweep")
    assert main(["explain", str(path), "--now", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("1 draft step instead of 2: ") and "1 draft steps" not in text
    assert "count a request's first and last cycle too" in text and "Sorted by the middle between" in text


def test_what_ifs_in_the_users_words(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "Verify  27% faster", "draft at zero", "verify at 5 ms", "wiring fixed: 0.9,0.9,0.9,0.9,0.9", "accept length 3",
        "k=4",
    ]  # fmt: skip
    words = [word for question in asked for word in ("--what-if", question)]
    result = explained(capsys, str(run_dir), "--now", "5", *words)
    found = {answer["question"]: answer for answer in result["what_if"]}
    law, present = Law(), next(row for row in result["curve"] if row["steps"] == 5)
    faster = found["Verify  27% faster"]["here"]
    assert faster["gain"]["point"] == pytest.approx(
        present["cycle_ms"]["point"] / (present["cycle_ms"]["point"] - 0.27 * law.verify_ms(6)), rel=0.01
    )
    assert found["accept length 3"]["here"]["accept_length_tokens"]["point"] == pytest.approx(3, abs=0.001)
    assert found["wiring fixed: 0.9,0.9,0.9,0.9,0.9"]["here"]["accept_length_tokens"]["point"] == pytest.approx(
        sum(0.9**i for i in range(6))
    )
    assert found["verify at 5 ms"]["here"]["phases_ms"]["verify"] == pytest.approx(5, rel=0.01)
    assert found["draft at zero"]["here"]["phases_ms"]["draft"] == 0
    assert found["k=4"]["here"]["steps"] == 4 and found["k=4"]["here"]["status"] == "interpolated"
    assert all(answer["assumptions"] for answer in found.values())


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("seams at zero", "host clock only"),
        ("draft at TP 1", "no collective was recorded"),
        ("wiring fixed", "check --probe"),
    ],
)
def test_what_the_run_does_not_hold_is_said(
    run_dir: Path, capsys: pytest.CaptureFixture[str], question: str, said: str
) -> None:
    (answer,) = explained(capsys, str(run_dir), "--what-if", question)["what_if"]
    assert answer["here"] is None and said in answer["reason"]


@pytest.mark.parametrize(
    "question",
    ["faster please", "attention 10 % faster", "verify 130 % faster", "accept length 9", "wiring fixed: 2",
     "wiring fixed: 0.8.7", "k=1000000000", f"k={'9' * 5000}", f"verify {'9' * 400} % slower"],
)  # fmt: skip
def test_words_that_are_not_understood(run_dir: Path, capsys: pytest.CaptureFixture[str], question: str) -> None:
    assert main(["explain", str(run_dir), "--what-if", question]) == 2


def test_the_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run_dir), "--what-if", "verify 27 % faster"]) == 0
    text = capsys.readouterr().out
    assert "What if: verify 27 % faster" in text and "3 things to try" in text and "break-even" in text
    assert "extrapolated: not shown by any measurement" in text and "$ specmeter " in text


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "docs" / "figures" / "vllm-20780.toml"
    assert main(["explain", "--figures", str(path)]) == 0
    assert "+5.7 %" in capsys.readouterr().out


def test_two_runs_are_one_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = write_run(tmp_path / "two", Law(), [0, 2])
    five = write_run(tmp_path / "five", Law(), [0, 5], seed=1)
    result = explained(capsys, str(two), str(five), "--now", "2")
    assert {row["steps"]: row["status"] for row in result["curve"]}[3] == "interpolated"


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({"kind": "check"}, [], "of kind check"),
        ({}, ["--upto", "99"], "--upto is 99"),
        ({}, ["--now", "0"], "no chain"),
        ({}, ["--now", "1000000000"], "up to 16 draft steps"),
        ({}, ["--experts", "8"], "names no experts"),
        ({}, ["--acceptance", "high"], "no list of shares"),
    ],
)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], arguments: list[str], said: str
) -> None:
    path = write_run(tmp_path / "run", Law(), [0, 3], changes=changes)
    assert main(["explain", str(path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_no_cycles_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", Law(), [0, 3])
    for table in ("cycles", "spans"):
        for found in path.glob(f"{table}.*"):
            found.unlink()
    assert main(["explain", str(path)]) == 2
    assert "no recorded cycles" in capsys.readouterr().err


def test_commands_start_the_users_server_with_another_setting() -> None:
    words = ("vllm", "serve", "M", "--speculative-config", '{"method": "eagle3", "model": "H"}')
    vllm = ServerCommands("vllm", words)
    typed = shlex.split(vllm.setting(4, 1, 5))
    assert typed[:3] == ["specmeter", "profile", "--"] and json.loads(typed[-1])["num_speculative_tokens"] == 4
    assert "--speculative-config" not in vllm.setting(0, 1, 1)
    assert vllm.wiring() == "specmeter check --target M --draft H --engine vllm --probe"
    assert ServerCommands("embedded").setting(3, 4, 8) == "specmeter profile --steps 3 --topk 4 --draft-tokens 8"
    sglang = ServerCommands("sglang").setting(2, 1, 3)
    assert PLACE in sglang and "--speculative-num-draft-tokens 3" in sglang
    for engine in ("sglang", "vllm"):  # no step count turns speculation off, its flags do
        assert ServerCommands(engine).setting(0, 1, 1) == f"specmeter bench -- {PLACE}-WITHOUT-SPECULATION"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_cycle_is_drawn_and_everything_fits(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["explain", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    bars = {line[:10].strip(): line for line in lines if "|" in line[:11]}
    now = next(name for name in bars if name.endswith(" now"))
    assert "V" in bars[now] and "=" in bars["plain step"] and bars[now].endswith(" ms")
    assert all(len(line) <= width for line in lines if not line.startswith("   $ "))
