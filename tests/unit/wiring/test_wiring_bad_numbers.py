"""Configs and options with numbers that no model or server can have: each is named, none is taken or waited for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from specmeter.cli import main
from tests.support.wiring_pairs import make


def command(folder: Path, *more: str, **draft: object) -> list[str]:
    made = make("llama")
    made.draft.update(draft)
    target, head = made.write(folder)
    return ["check", "--target", str(target), "--draft", str(head), *more]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_absurd_layers_are_refused_at_once(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path)
    path = tmp_path / role / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**9}))
    began = time.monotonic()
    assert main(arguments) == 2
    assert time.monotonic() - began < 30
    said = capsys.readouterr().err
    assert "num_hidden_layers = 1000000000" in said and "why:" in said and "next:" in said


@pytest.mark.parametrize("engine", [[], ["--engine", "vllm==0.32.0"]])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_hidden_layers", 0),
        ("head_dim", 0),
        ("intermediate_size", 0),
        ("intermediate_size", -5),
        ("vocab_size", 0),
        ("vocab_size", 10**18),
        ("draft_vocab_size", 0),
        ("max_position_embeddings", -1),
        ("rms_norm_eps", "a"),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", True),
        ("rope_theta", 0),
        ("rope_theta", "a"),
        ("rope_theta", float("inf")),
        ("rope_scaling", "yarn"),
        ("rope_scaling", [1]),
    ],
)
def test_a_number_that_cannot_be_is_an_error_by_name(
    key: str, value: object, engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, *engine, "--json", **{key: value})) == 1
    findings = json.loads(capsys.readouterr().out)["result"]["findings"]
    named = [f for f in findings if f["id"] in ("config-number", "rope") and f"the head's {key} is" in f["what"]]
    assert [f["severity"] for f in named] == ["error"] and named[0]["cause"] and named[0]["cure"]


def test_a_target_without_a_vocabulary_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, "--json")
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 0}))
    assert main(arguments) == 1
    assert "the target's vocab_size is 0" in capsys.readouterr().out


def test_a_size_that_is_a_word_says_why_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, head_dim="a")) == 2
    said = capsys.readouterr().err
    assert "head_dim = 'a'" in said and "why:" in said and "next:" in said


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--trained", "1,2"], "The head's fc takes 3 states, not 2."),
        (["--trained", "99,100,101"], "The target has 32 layers"),
        (["--trained=-1,2,3"], "H[0], the embedding output, to H[32]"),
        (["--trained", "3,3,29"], "A state is named twice"),
        (["--tp", "0"], "--tp is 0."),
        (["--tp", "-1"], "from 1 to 10,000"),
        (["--draft-tp", "0"], "--draft-tp is 0."),
        (["--serve-context", "-1"], "--serve-context is -1."),
        (["--steps", "99999999999"], "--steps is 99999999999."),
        (["--steps", "-1"], "--steps is -1."),
        (["--topk", "99999999999"], "--topk is 99999999999."),
        (["--threads", "0", "--probe"], "--threads is 0."),
        (["--live", "--wait", "nan"], "no time to wait"),
    ],
)
def test_an_option_that_no_server_has_exits_two_with_the_reason(
    more: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, *more)) == 2
    said = capsys.readouterr().err
    assert reason in said and "why:" in said and "next:" in said
