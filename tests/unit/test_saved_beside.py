"""What is saved beside a measurement: the wiring of the pair that the server runs, versions, environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import specmeter
from specmeter.cli import main
from specmeter.commands.model_folders import models_of
from specmeter.commands.saved_wiring import keep_beside, keep_server, keep_wiring
from specmeter.engines import ServerSpec
from specmeter.trace.environment import measured_environment, package_versions
from specmeter.trace.masking import MASK
from specmeter.trace.rundir import RunWriter, load
from tests.support.report_documents import check_result, profile, record, save, sweep
from tests.support.wiring_pairs import make

PLAN = {"engine": "embedded", "engine_version": "0.1.0", "python": {"executable": sys.executable}}


def test_models_as_commands_name_them() -> None:
    assert models_of("sglang", ["x", "--model-path", "/t", "--speculative-draft-model-path=/d"]) == ("/t", "/d")
    assert models_of("vllm", ["vllm", "serve", "/t", "-sc", '{"model": "/d"}']) == ("/t", "/d")
    assert models_of("vllm", ["vllm", "serve", "/t", "-sc", "{"]) == (None, None)
    assert models_of("embedded", ["serve", "--model", "/t"]) == ("/t", None), "the packaged head fits its own model"
    assert models_of("embedded", ["serve", "--draft", "none"])[1] is None
    own = models_of("embedded", ["serve"])
    assert own[1] is not None and (Path(own[1]) / "config.json").is_file()
    assert models_of("other", ["x"]) == (None, None)


def test_the_wiring_of_the_pair_is_kept(tmp_path: Path) -> None:
    target, draft = make("llama").write(tmp_path / "pair")
    writer = RunWriter.create(tmp_path / "run", ["x"])
    spec = ServerSpec(engine="embedded", command=("serve", "--model", str(target), "--draft", str(draft)))
    found = keep_wiring(writer, spec, PLAN)
    writer.finish()
    run = load(writer.path)
    assert (
        found and run.wiring == found and found["target"] == str(target) and found["feeds"][0]["engine"] == "specmeter"
    )
    assert (writer.path / "wiring.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "words", [("serve", "--model", "/no/such", "--draft", "/none/such"), ("serve", "--draft", "none")]
)
def test_a_pair_that_is_not_known_fails_nothing_and_is_said(tmp_path: Path, words: tuple[str, ...]) -> None:
    writer = RunWriter.create(tmp_path / "run", ["x"])
    assert keep_wiring(writer, ServerSpec(engine="embedded", command=words), PLAN) is None
    writer.finish()
    run = load(writer.path)
    assert run.wiring == {} and run.run["wiring"].startswith("not checked: ")


def test_a_broken_head_fails_nothing_and_is_said(tmp_path: Path) -> None:
    target, draft = make("llama").write(tmp_path / "pair")
    (draft / "config.json").write_text("{")
    writer = RunWriter.create(tmp_path / "run", ["x"])
    words = ("serve", "--model", str(target), "--draft", str(draft))
    assert keep_wiring(writer, ServerSpec(engine="embedded", command=words), PLAN) is None
    writer.finish()
    assert load(writer.path).run["wiring"].startswith("not checked: ")


def test_versions_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("MY_PRIVATE_THING", "x")
    writer = RunWriter.create(tmp_path / "run", ["x"])
    words = ("serve", "--api-key", "sk-secret", "--port", "1")
    keep_server(writer, ServerSpec(engine="embedded", command=words, env={"NCCL_P2P": "1", "X_TOKEN": "hush"}), PLAN)
    writer.finish()
    run = load(writer.path).run
    assert run["server"] == ["serve", "--api-key", MASK, "--port", "1"]
    assert run["server_env"] == {"NCCL_P2P": "1", "X_TOKEN": MASK}
    assert run["env"]["NCCL_ALGO"] == "Tree" and run["env"]["HF_TOKEN"] == MASK and "MY_PRIVATE_THING" not in run["env"]
    assert run["versions"]["specmeter"] == specmeter.__version__ and "numpy" in run["versions"]
    assert package_versions(str(tmp_path / "no-python")) == {} and package_versions("/bin/false") == {}
    assert measured_environment({"OMP_NUM_THREADS": "2", "HOME": "/h"}) == {"OMP_NUM_THREADS": "2"}


def test_report_makes_all_of_a_demo_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, requests = record(tmp_path / "rings")
    writer = save(tmp_path / "run", trace, requests, sweep(tmp_path / "s"))
    (writer.path / "children").mkdir()
    inner = save(writer.path / "children" / "profile", trace, requests, profile(tmp_path / "p"))
    inner.write_wiring({"schema": "specmeter/check/1", "result": check_result()})
    assert main(["report", str(writer.path)]) == 0
    text = capsys.readouterr().out
    first, second, third = text.index("Speculation wins"), text.index("k2 is best"), text.index("Wiring is wrong")
    assert first < second < third and "Where the cycle goes" in text and "x baseline" in text
    assert main(["report", str(writer.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["result"]["kind"] == "sweep" and document["parts"]["profile"]["kind"] == "profile"
    assert document["wiring"]["errors"] == 1


def test_a_sweep_keeps_both_by_its_own_plan_or_a_childs(tmp_path: Path) -> None:
    target, draft = make("llama").write(tmp_path / "pair")
    spec = ServerSpec(engine="embedded", command=("serve", "--model", str(target), "--draft", str(draft)))
    for name, below in (("together", False), ("apart", True), ("none", None)):
        writer = RunWriter.create(tmp_path / name, ["x"])
        if below is not None:
            (writer.child("k=1") if below else writer).write_plan(PLAN)
        keep_beside(writer, spec)
        writer.finish()
        run = load(writer.path)
        assert bool(run.wiring) == (below is not None) and ("server" in run.run) == (below is not None)
