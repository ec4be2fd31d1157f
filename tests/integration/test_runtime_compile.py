"""torch.compile's functions are refused in the live process, and a compilation while armed sees the original code."""

from __future__ import annotations

from pathlib import Path

import pytest

from specmeter.control import arm
from specmeter.runtime import layout
from tests.support.children import ask, environment, only_process, running
from tests.support.toy import Mark, Toy, make_toy, records

pytest.importorskip("torch")

SOURCE = """
import torch

def leaf(x):
    return x + 1

def helper(x):
    return leaf(x) * 2

def root(x):
    return helper(x) - 1

class Inner(torch.nn.Module):
    def forward(self, x):
        return leaf(x)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        return self.inner(x) + leaf(x)

def step(call, x):
    return around(call, x)

def around(call, x):
    return call(x)
"""
MARKS = [Mark("leaf"), Mark("helper", "helper"), Mark("self.inner", "inner"), Mark("around", "around")]
SHELL = """
import sys, torch, toymod
torch.set_num_threads(1)
x = torch.ones(2)
names = {"helper": toymod.helper, "root": toymod.root, "Inner": toymod.Inner.forward, "Model": toymod.Model.forward,
         "step": toymod.step}
codes = {name: f.__code__ for name, f in names.items()}
kept = {}
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
PROBED = "sorted(n for n, f in names.items() if f.__code__ is not codes[n])"
COMPILED = "torch.compile({}, backend='eager', fullgraph={})"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return make_toy(tmp_path, "toymod", SOURCE, MARKS)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("ran", [False, True])
def test_arming_refuses_what_is_compiled_or_inlined(ran: bool, fullgraph: bool, toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        ask(child, f"kept.update(f={COMPILED.format('toymod.root', fullgraph)}).__class__")
        ask(child, f"kept.update(m={COMPILED.format('toymod.Model()', fullgraph)}).__class__")
        if ran:
            assert ask(child, "kept['f'](x).tolist(), kept['m'](x).tolist()") == "([3.0, 3.0], [4.0, 4.0])"
        report = arm(link).done[0].report
        assert ask(child, PROBED) == "['step']" if ran else "['helper', 'step']"
        reasons = " ".join(entry["reason"] for entry in report["refused"])
        assert "torch.compile" in reasons and "root" in reasons and "Model.forward" in reasons
        assert ("helper" in reasons) == ran, "an inlined function is known once it was inlined"
        for _ in range(2):
            assert ask(child, "kept['f'](x).tolist(), kept['m'](x).tolist()") == "([3.0, 3.0], [4.0, 4.0])"
        assert ask(child, "toymod.step(kept['f'], x).tolist()") == "[3.0, 3.0]", "a probe around it is fine"
        assert ask(child, PROBED) == "['step']", "what a compilation inlines while armed is refused after it"
    found = records(only_process(link).ring)
    assert set(found["point"][found["kind"] == layout.KIND_HOST_SPAN].tolist()) == {toy.id("around")}
    assert only_process(link).report["faults"] == []


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compilation_while_armed_works_as_without_us(fullgraph: bool, toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert (
            ask(child, f"kept.update(f={COMPILED.format('toymod.root', fullgraph)}).__class__") == "<class 'NoneType'>"
        )
        for _ in range(3):
            assert ask(child, "kept['f'](x).tolist()") == "[3.0, 3.0]"
            assert ask(child, "toymod.step(toymod.helper, x).tolist()") == "[4.0, 4.0]"
        report = arm(link).done[0].report
        assert any("root" in entry["reason"] for entry in report["refused"])
        assert ask(child, "kept['f'](x).tolist()") == "[3.0, 3.0]"
    assert only_process(link).report["faults"] == []


def test_without_torch_nothing_of_it_is_imported(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, "toymod", "def leaf(x): return x\ndef run(): return leaf(1)\n", [Mark("leaf")])
    link = toy.link(tmp_path / "links")
    with running(
        "import sys, toymod\nprint('ready', flush=True)\nfor line in sys.stdin: print(repr(eval(line)), flush=True)",
        environment(link, tmp_path),
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert arm(link).done[0].armed and ask(child, "'torch' in sys.modules") == "False"
