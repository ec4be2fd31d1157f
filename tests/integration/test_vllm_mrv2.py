"""Model runner V2 of a real vLLM: its modules imported under an armed link, every place taken by the live process.

V2 needs Triton with a CUDA device, so on CPU it does not run: hits of these places are not tested, that each of them is
found in the live functions and swapped there and back is.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from specmeter.control import arm, disarm, interpreter_of, launch_env, processes
from specmeter.control.prepare import prepare_link
from tests.support.children import ask
from tests.support.installed import installed

VLLM = os.environ.get("SPECMETER_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM, reason="SPECMETER_VLLM_PYTHON names no environment with vLLM"),
]
SHELL = """
import importlib, sys
modules = [importlib.import_module(name) for name in sys.argv[1:]]
def probed():
    owners = [vars(m) for m in modules] + [vars(c) for m in modules for c in vars(m).values() if isinstance(c, type)]
    found = {id(f): f for space in owners for f in space.values()}
    while any(hasattr(f, "__wrapped__") for f in found.values()):
        found = {id(g): g for f in found.values() for g in [getattr(f, "__wrapped__", f)]}
    return sum("make_writers" in repr(getattr(f, "__code__", None) and f.__code__.co_consts) for f in found.values())
print("up", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


def test_every_place_of_runner_v2_is_taken_by_its_live_modules(tmp_path: Path) -> None:
    assert VLLM
    (tmp_path / "links").mkdir(mode=0o700)
    link = prepare_link([VLLM], engine="vllm", base=tmp_path / "links")
    points = {point["id"]: point for point in link.plan()["points"] if point["runner"] == "mrv2"}
    required = {point["name"] for point in points.values() if point["required"]}
    assert len(points) > 25 and {"verify.forward", "draft.forward", "accept.sample"} <= required
    modules = sorted({point["module"] for point in points.values()})
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [VLLM, "-c", SHELL, *modules], env=launch_env(link), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, text=True, cwd=tmp_path,
        )  # fmt: skip
    try:
        assert server.stdout is not None
        while (line := server.stdout.readline()) != "up\n":
            assert line, (tmp_path / "log").read_text()[-2000:]  # vLLM says things of its own before
        assert ask(server, "probed()") == "0"
        report = arm(link, timeout_s=30).done[0].report
        assert set(points) <= set(report["armed_points"]) and report["faults"] == []
        assert not [entry for entry in report["refused"] if set(entry["points"]) & set(points)]
        assert (
            int(ask(server, "probed()"))
            >= len({point["qualname"].split(".<locals>")[0] for point in points.values()}) - 2
        )
        disarm(link, timeout_s=30)
        assert ask(server, "probed()") == "0" and processes(link)[0].report["armed_points"] == []
    finally:
        server.kill()
        server.communicate()


PLUGINS = """
import json, sys
before = "_specmeter_runtime.boot" in sys.modules
from vllm.plugins import load_general_plugins
import vllm.plugins, vllm.v1.core.sched.output
load_general_plugins()
first = sys.modules["_specmeter_runtime.boot"].current()
vllm.plugins.plugins_loaded = False
load_general_plugins()
hooks = sum(type(finder).__name__ == "ImportHook" for finder in sys.meta_path)
import vllm.v1.core.sched.scheduler
again = sys.modules["_specmeter_runtime.boot"].current()
print(json.dumps([before, first is again and first is not None, hooks]), flush=True)
"""


@pytest.mark.parametrize("both", [False, True])
def test_vllm_s_own_plugin_loader_starts_the_runtime_once(both: bool, tmp_path: Path) -> None:
    """The second launch route, through installed metadata; with the first one beside it there is one runtime too."""
    assert VLLM
    (tmp_path / "links").mkdir(mode=0o700)
    link = prepare_link([VLLM], engine="vllm", base=tmp_path / "links")
    env = {**os.environ, "PYTHONPATH": str(installed(tmp_path / "site")), "SPECMETER_LINK": str(link.path)}
    env = launch_env(link, env) if both else env
    done = subprocess.run([VLLM, "-c", PLUGINS], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [both, True, 2], "one hook for modules, one for the tracer"
    (process,) = processes(link)
    assert process.report["modules"]["vllm.v1.core.sched.scheduler"] == "ready" and process.report["faults"] == []


def test_the_console_script_names_the_environment_that_is_planned_for(tmp_path: Path) -> None:
    """What `specmeter run -- vllm serve MODEL` does before it starts the server."""
    assert VLLM
    script = Path(VLLM).with_name("vllm")
    env = {**os.environ, "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["vllm", "serve", "some/model"]
    found = interpreter_of(command, env)
    assert found.parent == script.parent and found.resolve() == Path(VLLM).resolve()
    (tmp_path / "links").mkdir(mode=0o700)
    plan = prepare_link(command, base=tmp_path / "links", env=env).plan()
    assert plan["engine"] == "vllm" and not [entry for entry in plan["refused"] if entry["required"]]
    assert all(Path(point["path"]).is_relative_to(script.parents[1]) for point in plan["points"])
