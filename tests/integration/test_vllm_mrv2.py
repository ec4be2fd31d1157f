"""Model runner V2 of a real vLLM: its modules imported under an armed link, every place taken by the live process.

V2 needs Triton with a CUDA device, so on CPU it does not run: hits of these places are not tested, that each of them is
found in the live functions and swapped there and back is.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from specmeter.control import arm, disarm, launch_env, processes
from specmeter.control.prepare import prepare_link
from tests.support.children import ask

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
