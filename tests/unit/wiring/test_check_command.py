"""``specmeter check`` as a user runs it: exit codes, JSON, what it says, and what it never loads."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specmeter.cli import main
from specmeter.control.link import make_link
from specmeter.wiring.locate import installed
from tests.support.wiring_pairs import make

IDS = "eagle_aux_hidden_state_layer_ids"


def command(folder: Path, *more: str, **draft: object) -> list[str]:
    made = make("llama")
    made.draft.update(draft)
    target, head = made.write(folder)
    return ["check", "--target", str(target), "--draft", str(head), *more]


def test_a_sound_pair_exits_zero_and_says_what_is_fed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--engine", "vllm==0.32.0")) == 0
    out = capsys.readouterr().out
    assert "feeds H[2], H[16], H[29]" in out and "0 errors, 0 warnings" in out
    assert "from the table of releases" in out


def test_an_error_exits_one_with_cause_cure_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, "--engine", "vllm==0.32.0", "--trained", "3,16,28", **{IDS: [2, 15, 27]})
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "Each state is taken 1 layer before the trained one." in out and f"{IDS}: [3, 16, 28]" in out
    assert main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "specmeter/check/1" and document["command"] == "check"
    result = document["result"]
    assert result["errors"] == 1 and result["feeds"][0]["states"] == [2, 15, 27]
    assert result["feeds"][0]["key_read"] == IDS
    shift = next(f for f in result["findings"] if f["id"] == "wiring-shift")
    assert shift["severity"] == "error" and shift["cause"] and shift["cure"]


def test_bad_input_exits_two_with_a_json_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, "--json")
    (tmp_path / "draft" / "config.json").unlink()
    assert main(arguments) == 2
    assert "no config.json" in json.loads(capsys.readouterr().out)["error"]["what"]


def test_the_headline_never_calls_a_wiring_right_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without an engine named a fault is a warning; the headline must not hide it.
    assert main(command(tmp_path, "--trained", "3,16,28", **{IDS: [3, 16, 28]})) == 0
    headline = capsys.readouterr().out.splitlines()[0]
    assert headline.startswith("Wiring is in doubt: sglang") and "H[2], H[16], H[29]" in headline
    assert main(command(tmp_path / "sound")) == 0
    assert capsys.readouterr().out.startswith("Wiring is right")
    target = str(tmp_path / "sound" / "target")
    assert main(["check", "--target", target, "--draft", target]) == 0
    assert capsys.readouterr().out.startswith("Wiring cannot be told: the draft")


def test_a_warning_fails_only_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, "--engine", "vllm==0.32.0", max_position_embeddings=2048)
    assert main(arguments) == 0
    assert "0 errors, 1 warning" in capsys.readouterr().out
    assert main([*arguments, "--fail-on", "warning"]) == 1
    sound = command(tmp_path / "sound", "--engine", "vllm==0.32.0", "--fail-on", "warning")
    assert main(sound) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--engine", "trt==1"], "unknown engine"),
        (["--engine", "sglang"], "neither the source nor the version"),
        (["--engine", "sglang==x"], "'x' is not a version"),
        (["--engine", "vllm==" + "9" * 5000], "is not a version"),
        (["--engine", "vllm=="], "--engine vllm== names no version"),
        (["--path", "/"], "needs --engine"),
        (["--engine", "vllm", "--path", "/nowhere"], "there is no vllm package"),
        (["--trained", "a,b"], "is not a list of layers"),
        (["--url", "http://127.0.0.1:1"], "--url needs --live"),
        (["--live", "--wait", "0"], "no time to wait"),
        (["--link", "no-such-link"], "no-such-link"),
    ],
)
def test_usage_mistakes(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


def test_a_python_tells_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "--python", sys.executable, "--json")) in (0, 1)
    feeds = json.loads(capsys.readouterr().out)["result"]["feeds"]
    assert {feed["engine"] for feed in feeds} == {"specmeter"}
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").touch()
    (tmp_path / "site" / "vllm-0.32.0.dist-info").mkdir()
    (tmp_path / "site" / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = installed(sys.executable)
    assert [(engine.name, engine.version) for engine in found] == [("vllm", "0.32.0")]
    assert found[0].tree is not None


@pytest.mark.parametrize("engine", ["vllm==abc", "vllm==", "trt"])
def test_an_engine_that_cannot_be_says_why_and_what_to_do(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "--engine", engine)) == 2
    said = capsys.readouterr().err
    assert "why:" in said and "next:" in said


def test_releases_before_the_table_are_answered_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, "--fail-on", "warning")
    for engine, oldest in (("vllm", "0.10.2"), ("sglang", "0.4.6.post5")):
        assert main([*arguments, "--engine", f"{engine}==0.0.1"]) == 1
        assert f"which reaches back to {oldest}" in capsys.readouterr().out
        main([*arguments, "--engine", f"{engine}=={oldest}"])
        assert "before-table" not in capsys.readouterr().out


def test_live_takes_the_only_link_when_it_is_free_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    plan = {"engine": "specmeter", "engine_version": "1.0", "points": [], "value_ids": {}}
    link = make_link(plan, {}, link_id="mine")
    arguments = command(tmp_path / "pair", specmeter_capture=[3, 16, 28])
    with (link.path / "lock").open("w") as other:
        other.write('{"user": "ann", "host": "box", "command": "specmeter top", "pid": 1}')
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main([*arguments, "--live"]) == 3
        said = capsys.readouterr().err
        assert "the only link, mine, is under the control" in said and "ann@box" in said and "--link mine" in said
        # Named, it is read along; this one has no wiring point to read.
        assert main([*arguments, "--link", "mine"]) == 3
        assert "link mine has no wiring point" in capsys.readouterr().err
    assert main([*arguments, "--live"]) == 3
    said = capsys.readouterr().err
    assert "taking the only link there is: mine" in said and "has no wiring point" in said


def test_an_environment_without_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--engine", "sglang", "--python", sys.executable)) == 5
    assert "sglang is not installed" in capsys.readouterr().err


def test_neither_torch_nor_numpy_is_imported(tmp_path: Path) -> None:
    arguments = command(tmp_path, "--engine", "vllm==0.32.0")
    loaded = "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    code = f"import sys; from specmeter.cli import main; main(sys.argv[1:]); {loaded}"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
