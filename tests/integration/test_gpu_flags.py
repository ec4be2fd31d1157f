"""The GPU scripts: flags and variables against SGLang 0.5.16's own source, SGLang's knob, the flow without a GPU."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sglang_device_gpu as device
import sglang_dummy_gpu as dummy
from corpus_fetch import fetch
from gpu_fleet import Start
from gpu_models import SHAPES

from specmeter.recipes import loader
from specmeter.source.resolve import resolve_recipes

RELEASE = "sglang==0.5.16"
# ``make corpus`` does all.
KNOB = {"sglang==0.5.9": False, "sglang==0.5.16": True, "sglang==0.5.23": True}


def _tree(release: str) -> Path:
    try:
        return fetch(release)
    except RuntimeError as error:
        pytest.skip(f"the wheel cannot be had: {error}")


def _fields(path: Path, name: str) -> set[str]:
    """Names that a class assigns in its body."""
    classes = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.ClassDef)]
    [found] = [node for node in classes if node.name == name]
    targets = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    targets += [target for node in found.body if isinstance(node, ast.Assign) for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _starts(folder: Path) -> list[Start]:
    found = device.starts(folder, folder, folder)
    for name, tp in (("8b", 1), ("moe", 1), ("70b", 2), ("moe200b", 8)):
        found += [one.start for one in dummy.Plan(SHAPES[name], tp, folder).wanted()]
    return found


def test_every_flag_of_the_scripts_is_a_field_of_sglang_s_arguments(tmp_path: Path) -> None:
    arguments = _fields(_tree(RELEASE) / "sglang/srt/server_args.py", "ServerArgs")
    flags = {word for start in _starts(tmp_path) for word in start.command if word.startswith("--")}
    assert len(flags) > 20
    assert {flag for flag in flags if flag.lstrip("-").replace("-", "_") not in arguments} == set()


def test_every_variable_of_the_scripts_is_read_by_sglang(tmp_path: Path) -> None:
    variables = _fields(_tree(RELEASE) / "sglang/srt/environ.py", "Envs")
    used = {name for start in _starts(tmp_path) for name in start.env if name.startswith("SGLANG_")}
    assert len(used) >= 4
    assert used - variables == set()


@pytest.mark.parametrize("release", sorted(KNOB))
def test_the_step_count_of_the_adaptive_runtime_is_a_knob(release: str) -> None:
    recipe = loader.built_in("sglang")
    plan = resolve_recipes({"recipes": [recipe.data], "path": str(_tree(release)), "with_code": False})
    assert [knob["name"] for knob in plan["knobs"]] == (["draft_steps"] if KNOB[release] else [])
    assert [item["reason"] for item in plan["knobs_refused"]] == (
        [] if KNOB[release] else ["it is not for version 0.5.9 (>=0.5.14)"]
    )


def test_the_scripts_flow_on_the_miniature_server(tmp_path: Path) -> None:
    """Start, warm-up, standing still, phases, a deep window of operators, a run directory, and what comes back."""
    script = Path(dummy.__file__)
    words = ["--shapes", "8b", "--only", "plain", "--budget", "200", "--rehearse", "--out", str(tmp_path / "out")]
    command = [sys.executable, str(script), "-", str(tmp_path / "work"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = tmp_path / "work" / "results" / "8b-tp1"
    step = json.loads((results / "plain.1.json").read_text())
    assert step["analysis"]["kind"] == "profile" and step["client"]["errors"] == []
    assert (results / "run-plain" / "analysis.json").is_file() and list((results / "run-plain" / "deep").iterdir())
    assert (tmp_path / "out" / "results.tgz.part-0").is_file()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and "all parts are done" in again.stdout
