"""The gate: worse beyond noise fails, noise does not, and what cannot be judged is an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.changes import changes
from specmeter.analysis.gate import judge, passed
from specmeter.analysis.setting_names import shown_setting
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.trace import Request
from specmeter.trace.rundir import load
from specmeter.trace.tables import read_table, request_columns, write_table
from tests.support.cost_runs import Law, write_run

LAW = Law()
WORSE_HEAD = Law(accept=(0.5, 0.4, 0.3, 0.3, 0.2, 0.2))


def runs(tmp_path: Path, new: Law, saved: Law = LAW, seed: int = 1, **options: object) -> tuple[Path, Path]:
    return (
        write_run(tmp_path / "new", new, [0, 3], seed=seed, **options),  # type: ignore[arg-type]
        write_run(tmp_path / "saved", saved, [0, 3], **options),  # type: ignore[arg-type]
    )


def words(paths: tuple[Path, Path]) -> dict[str, str]:
    return {f.quantity: f.word for f in judge(load(paths[0]), load(paths[1]))}


def test_the_same_again_passes(tmp_path: Path) -> None:
    found = words(runs(tmp_path, Law(noise=0.002), Law(noise=0.002), prompts=12, cycles=400))
    assert found["cycle"] == "not worse" and found["break_even"] == "not worse"
    assert found["accept_length"] in ("not worse", "unsettled")


def test_a_worse_head_fails_by_its_accept_length_only(tmp_path: Path) -> None:
    paths = runs(tmp_path, WORSE_HEAD)
    assert words(paths) == {"accept_length": "worse", "cycle": "not worse", "break_even": "not worse"}
    assert main(["gate", str(paths[0]), "--against", str(paths[1])]) == 1


def test_a_dearer_cycle_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = runs(tmp_path, Law(step=2.0))
    assert words(paths)["cycle"] == "worse" and words(paths)["break_even"] == "worse"
    assert main(["gate", str(paths[0]), "--against", str(paths[1])]) == 1
    text = capsys.readouterr().out
    assert text.startswith("FAILED: ") and "cycle of k=3 went from" in text and "+6 %" in text
    assert "saved, now: geometric means over the prompts of both runs" in " ".join(text.split())


def test_a_slower_machine_is_no_worse_break_even(tmp_path: Path) -> None:
    slow = Law(verify=20.0, per_width=0.8, step=1.6, extend=2.0, per_token=0.2, output=0.6)
    found = words(runs(tmp_path, slow))
    assert found["cycle"] == "worse" and found["break_even"] == "not worse"


def test_better_is_no_finding(tmp_path: Path) -> None:
    saved, better = Law(step=2.0), Law(accept=(0.9, 0.9, 0.9, 0.9, 0.9, 0.9))
    assert passed(judge(*(load(p) for p in runs(tmp_path, better, saved))))


def test_noise_leaves_it_open_and_says_what_would_settle_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = runs(tmp_path, Law(noise=0.2), Law(noise=0.2), prompts=4, cycles=6)
    assert words(paths)["accept_length"] == "unsettled"
    assert main(["gate", str(paths[0]), "--against", str(paths[1])]) == 0
    assert "would settle it" in capsys.readouterr().out
    assert main(["gate", str(paths[0]), "--against", str(paths[1]), "--settled"]) == 1


def test_thresholds_are_the_users(tmp_path: Path) -> None:
    paths = runs(tmp_path, Law(step=2.0))
    arguments = ["gate", str(paths[0]), "--against", str(paths[1]), "--cycle", "0.5", "--break-even", "0.5"]
    assert main([*arguments, "--accept-length", "0.9"]) == 0
    assert main([*arguments, "--accept-length", "2"]) == 2


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = runs(tmp_path, WORSE_HEAD)
    assert main(["gate", str(paths[0]), "--against", str(paths[1]), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "specmeter/gate/1" and document["result"]["passed"] is False
    first = document["result"]["findings"][0]
    assert first["after"] / first["before"] == pytest.approx(first["ratio"]["point"])


def test_sweeps_are_judged_by_setting(tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", Law(), [0, 2, 3], kind="sweep", seed=1)
    saved = write_run(tmp_path / "saved", Law(), [0, 1, 2], kind="sweep")
    assert {f.setting for f in judge(load(new), load(saved))} == {"k=2"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "bench"}, "no profile or sweep"),
        ({"engine": {"name": "vllm"}}, "different engines"),
        ({"acceptance": {"length_tokens": None}}, "accept length of k=3 cannot be judged"),
        ({"break_even_tokens": None}, "break even of k=3 cannot be judged"),
    ],
)
def test_runs_that_cannot_be_judged(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    new = write_run(tmp_path / "new", Law(), [0, 3], changes=changes)
    saved = write_run(tmp_path / "saved", Law(), [0, 3])
    with pytest.raises(SpecmeterError, match=said):
        judge(load(new), load(saved))


def test_no_shared_setting(tmp_path: Path) -> None:
    new, saved = write_run(tmp_path / "new", Law(), [0, 3]), write_run(tmp_path / "saved", Law(), [0, 4])
    with pytest.raises(SpecmeterError, match="share no setting"):
        judge(load(new), load(saved))


def test_no_run_directory(tmp_path: Path) -> None:
    assert main(["gate", str(tmp_path), "--against", str(tmp_path)]) == 2


def test_a_stall_of_the_machine_is_no_dearer_cycle(tmp_path: Path) -> None:
    paths = runs(tmp_path, Law())
    cycles = read_table(paths[0], "cycles")
    cycles["dur_ns"] = cycles["dur_ns"].copy()
    # A tenth of the setting's cycles, in every prompt.
    cycles["dur_ns"][np.flatnonzero(cycles["setting"] == "k=3")[5::10]] *= 65
    write_table(paths[0], "cycles", cycles)
    assert words(paths)["cycle"] == "not worse" and words(paths)["break_even"] == "not worse"


def test_the_servers_own_setting_is_called_after_its_steps(tmp_path: Path) -> None:
    own = write_run(tmp_path / "own", LAW, [0, 3], seed=1, own="server")
    asked = write_run(tmp_path / "asked", LAW, [0, 3])
    found = judge(load(own), load(asked))
    assert {f.setting for f in found} == {"k=3"}
    assert all(f.ratio is not None and f.ratio.unit == "prompt" for f in found), "the same prompts are paired"
    assert "settings" not in {change.name for change in changes(load(own), load(asked))}
    other = write_run(tmp_path / "other", LAW, [0, 2], own="server")
    with pytest.raises(SpecmeterError, match="share no setting"):
        judge(load(other), load(asked))
    assert [(c.a, c.b) for c in changes(load(other), load(asked)) if c.name == "settings"] == [
        ("baseline k=2", "baseline k=3")
    ]


def test_a_server_whose_steps_vary_keeps_its_name(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", LAW, [0, 3], own="server")
    table = read_table(path, "cycles")
    assert shown_setting(load(path), "server") == "k=3"
    for name, value in (("steps", 2), ("drafted", 9), ("drafted", -1)):
        changed = {key: column.copy() for key, column in table.items()}
        changed[name][-5] = value  # of the last prompt's speculative cycles
        for found in path.glob("cycles.*"):
            found.unlink()
        write_table(path, "cycles", changed)
        assert shown_setting(load(path), "server") == "server"


def with_requests(path: Path, tokens: int) -> Path:
    """The run with its requests, whose prompts have ``tokens`` tokens and more."""
    sent = [Request(f"r{n}", f"p{n}", "k=3", 0, 0, 1, 2, tokens + n, 9) for n in range(8)]
    write_table(path, "requests", request_columns(sent))
    return path


def test_other_prompts_of_the_same_name_are_refused(tmp_path: Path) -> None:
    new, saved = (with_requests(path, 20) for path in runs(tmp_path, LAW))
    assert main(["gate", str(new), "--against", str(saved)]) == 0
    other = with_requests(write_run(tmp_path / "other", LAW, [0, 3]), 31)
    with pytest.raises(SpecmeterError, match="different prompts under the same names, or another model"):
        judge(load(other), load(saved))
    for path, digest in ((new, "a"), (saved, "b")):
        document = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**document, "prompts_sha256": digest}))
    with pytest.raises(SpecmeterError, match="different prompts under one name"):
        judge(load(new), load(saved))


def test_another_model_is_refused_and_another_folder_of_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, saved = runs(tmp_path, LAW)
    for path, model in ((new, "/tmp/ci-7/model-a"), (saved, "model-a/")):
        document = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**document, "model": model}))
    assert main(["gate", str(new), "--against", str(saved)]) == 0
    document = json.loads((new / "run.json").read_text())
    (new / "run.json").write_text(json.dumps({**document, "model": "/tmp/ci-7/model-b"}))
    capsys.readouterr()
    assert main(["gate", str(new), "--against", str(saved)]) == 2
    assert "different models" in (said := capsys.readouterr().err) and "model-b" in said and "model-a" in said


def test_a_setting_that_the_new_run_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write_run(tmp_path / "new", Law(noise=0.002), [0, 2], kind="sweep", seed=1, prompts=12, cycles=400)
    saved = write_run(tmp_path / "saved", Law(noise=0.002), [0, 1, 2], kind="sweep", prompts=12, cycles=400)
    arguments = ["gate", str(new), "--against", str(saved), "--accept-length", "0.3"]
    assert main(arguments) == 0
    assert "lacks k=1 of the saved run" in capsys.readouterr().out
    assert main([*arguments, "--settled"]) == 1
    assert "k=1 of the saved run is missing" in capsys.readouterr().out
