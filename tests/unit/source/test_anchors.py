"""Anchors: by structure, exactly as many sites as stated, or a refusal that helps."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from specmeter.source.anchors import Refusal, Resolver, Site

SOURCE = """
import functools

class Worker:
    @functools.lru_cache
    def run(self, batch, size=default()):
        head = self.prepare(batch)
        for item in self.items(batch):
            self.step(item)
            while self.more():
                self.step(item, last=True)
        else:
            self.step(None)
        with self.lock():
            out = self.step(head)
        parts = [self.step(x) for x in self.sources() if self.keep(x)]
        kernel[(size,)](head, out)
        def inner():
            return self.step(out)
        later = lambda: self.step(out)
        return inner, later, parts

    async def serve(self):
        async for request in self.requests():
            await self.handle(request)

    def endless(self):
        while True:
            self.tick()

if CONDITION:
    def chosen():
        return first()
else:
    def chosen():
        return second()
"""


@pytest.fixture
def resolver(tmp_path: Path) -> Resolver:
    (tmp_path / "engine.py").write_text(textwrap.dedent(SOURCE))
    return Resolver([str(tmp_path)])


def resolve(resolver: Resolver, **anchor: Any) -> list[Site] | Refusal:
    kind = "call" if "call" in anchor else "body"
    return resolver.resolve({"module": "engine", "function": "Worker.run", **anchor}, kind)


def texts(outcome: list[Site] | Refusal) -> list[str]:
    assert not isinstance(outcome, Refusal), outcome
    return [site.text for site in outcome]


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("for", ["self.step(item)", "self.step(item, last=True)", "self.step(x)"]),
        ("while", ["self.step(item, last=True)"]),
        ("with", ["self.step(head)"]),
        ("none", ["self.step(None)", "self.step(head)"]),
    ],
)
def test_inside(resolver: Resolver, inside: str, expected: list[str]) -> None:
    assert texts(resolve(resolver, call=r"^self\.step$", inside=inside, sites=len(expected))) == expected


def test_what_is_evaluated_once_lies_outside(resolver: Resolver) -> None:
    for call in ("items", "sources"):
        assert texts(resolve(resolver, call=rf"^self\.{call}$", inside="none"))
    assert texts(resolve(resolver, call=r"^self\.lock$", inside="none")) == ["self.lock()"]
    assert isinstance(resolve(resolver, call=r"^self\.lock$", inside="with"), Refusal)
    # A while's condition and a comprehension's filter are evaluated in every turn.
    assert texts(resolve(resolver, call=r"^self\.more$", inside="while")) == ["self.more()"]
    assert texts(resolve(resolver, call=r"^self\.keep$", inside="for")) == ["self.keep(x)"]


def test_bodies_of_nested_functions_and_lambdas_are_not_the_function_s(resolver: Resolver) -> None:
    assert texts(resolve(resolver, call=r"^self\.step$", sites=5))
    assert texts(resolve(resolver, function="Worker.run.<locals>.inner", call=r"^self\.step$")) == ["self.step(out)"]


def test_launches_async_loops_and_arguments(resolver: Resolver) -> None:
    assert texts(resolve(resolver, call=r"^kernel\[")) == ["kernel[(size,)](head, out)"]
    assert texts(resolve(resolver, function="Worker.serve", call="handle$", inside="for")) == ["self.handle(request)"]
    assert texts(resolve(resolver, call=r"step$", args=r"last=True")) == ["self.step(item, last=True)"]


def test_positions_are_those_of_the_call(resolver: Resolver, tmp_path: Path) -> None:
    outcome = resolve(resolver, call=r"^self\.step$", args="last")
    assert not isinstance(outcome, Refusal)
    site = outcome[0]
    line = (tmp_path / "engine.py").read_text().splitlines()[site.line - 1]
    assert line[site.col : site.end_col] == site.text
    assert (site.qualname, site.module) == ("Worker.run", "engine")


def test_body(resolver: Resolver) -> None:
    assert texts(resolve(resolver)) == ["def run(self, batch, size=default()):"]
    outcome = resolve(resolver, function="chosen")
    assert isinstance(outcome, Refusal)
    assert outcome.reason == "2 definitions of chosen, not 1"
    assert texts(resolve(resolver, function="chosen", call="first"))
    outcome = resolve(resolver, function="chosen", call="first|second", sites=2)
    assert isinstance(outcome, Refusal) and "2 calls are in 2 definitions of chosen" in outcome.reason


def test_refusals_say_how_far_and_what_is_near(resolver: Resolver) -> None:
    outcome = resolve(resolver, module="engin", call="x")
    assert isinstance(outcome, Refusal) and (outcome.reached, outcome.nearest) == ("", ("engine",))
    outcome = resolve(resolver, function="Wrker.run", call="x")
    assert isinstance(outcome, Refusal) and outcome.reached == "engine" and "Worker.run" in outcome.nearest
    outcome = resolve(resolver, call=r"^self\.step$")
    assert isinstance(outcome, Refusal) and "5 calls match" in outcome.reason
    assert "line 9: self.step (inside for)" in outcome.nearest
    outcome = resolve(resolver, call=r"^self\.stepp$")
    assert isinstance(outcome, Refusal) and "0 calls" in outcome.reason
    assert any("self.step" in near for near in outcome.nearest)


def test_text_that_only_looks_like_a_call_is_none(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(
        'def run():\n    """self.step()"""\n    # self.step()\n    return "self.step()"\n'
    )
    outcome = Resolver([str(tmp_path)]).resolve({"module": "engine", "function": "run", "call": "step"}, "call")
    assert isinstance(outcome, Refusal)


DEAD = """
from typing import TYPE_CHECKING, overload

class Worker:
    if TYPE_CHECKING:
        def run(self): self.step()
    def run(self): return self.other(1)

    def verify(self): return self.step()
    def verify(self): return self.other(2)

    @overload
    def size(self, kind: int): ...
    @overload
    def size(self, kind: str): ...
    def size(self, kind): return self.other(3)

    @property
    def k(self): return self.step()
    @k.setter
    def k(self, value): self.other(value)

class Twice:
    def run(self): return self.step()
class Twice:
    def run(self): return self.other(4)
"""


def test_what_never_runs_under_its_name_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(DEAD)
    resolver = Resolver([str(tmp_path)])
    for function in ("Worker.run", "Worker.verify", "Worker.size", "Twice.run"):
        assert isinstance(resolve(resolver, function=function, call="step"), Refusal)
        assert len(texts(resolve(resolver, function=function, call="other"))) == 1
        assert len(texts(resolve(resolver, function=function))) == 1
    assert len(texts(resolve(resolver, function="Worker.k", call="step"))) == 1, "a setter replaces no getter"
    assert len(texts(resolve(resolver, function="Worker.k", call="other"))) == 1
