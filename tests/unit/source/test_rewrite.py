"""The rewriter and the binding of its placeholders: same behaviour, same lines, the right refusals."""

from __future__ import annotations

import ast
import asyncio
import marshal
import sys
import textwrap
import threading
import traceback
import types
import warnings
from typing import Any

import pytest

from specmeter.runtime import layout, swap
from specmeter.runtime.swap import bind, find_functions
from specmeter.source.rewrite import rewrite_module
from tests.support.toy import Mark, plan_points


def probed(
    source: str, *marks: Mark, name: str = "sample"
) -> tuple[types.ModuleType, list[tuple[str, Any]], list[str]]:
    """The module with its points in, the list that its probes append (name, result) to, and the refusals' reasons."""
    source = textwrap.dedent(source)
    points = plan_points(source.encode(), f"{name}.py", name, list(marks))
    assert points, "the marks mean nothing in that source"
    answer = rewrite_module(ast.parse(source), f"{name}.py", name, "", points)
    content = marshal.loads(answer["blob"])
    module = types.ModuleType(name)
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), module.__dict__)
    seen: list[tuple[str, Any]] = []

    def pair(point: dict[str, Any]) -> Any:
        def end(begin: int, result: Any, id: int, thread: Any, *names: Any) -> Any:
            assert (begin, id) == (11, point["id"] << layout.POINT_SHIFT) and thread in (None, threading.get_ident())
            seen.append((point["name"], result, *names) if names else (point["name"], result))
            return result

        return (lambda: 11), end

    pairs = {point["id"]: pair(point) for point in points}
    for entry in content["functions"]:
        for function in find_functions(module, entry["qualname"], entry["code"]):
            function.__code__ = bind(entry["code"], pairs, function.__code__.co_filename)
    return module, seen, [refusal["reason"] for refusal in answer["refused"]]


MATCH = pytest.mark.skipif(sys.version_info < (3, 10), reason="match came with Python 3.10")
CASES = {
    "method": (
        "class A:\n def g(self, x): return x + 1\n def f(self): return self.g(2)\nrun = lambda: A().f()",
        "self.g",
        3,
    ),
    "mangled name": (
        "class A:\n def __g(self): return 5\n def f(self): return self.__g()\nrun = lambda: A().f()",
        "self.__g",
        5,
    ),
    "super": (
        "class B:\n def g(self): return 1\nclass A(B):\n def g(self): return super().g() + 1\nrun = lambda: A().g()",
        "super().g",
        2,
    ),
    "closure": ("def f(k):\n def h(x): return g(x) + k\n return h(3)\ndef g(x): return x\nrun = lambda: f(4)", "g", 7),
    "tuple unpacking": ("def g(): return 1, 2\ndef run():\n a, b = g()\n return a + b", "g", 3),
    "walrus": ("def g(x): return x\ndef run():\n return g(y := 4) + y", "g", 8),
    "starred": ("def g(*a, **k): return (a, k)\ndef run(): return g(*[1, 2], **{'z': 3})", "g", ((1, 2), {"z": 3})),
    "list comprehension": ("def g(x): return x * 2\ndef run(): return [g(x) for x in range(3)]", "g", [0, 2, 4]),
    "generator expression": ("def g(x): return x * 2\ndef run(): return sum(g(x) for x in range(4))", "g", 12),
    "static method": ("class A:\n @staticmethod\n def f(): return g()\ndef g(): return 6\nrun = lambda: A.f()", "g", 6),
    "class method": ("class A:\n @classmethod\n def f(c): return g()\ndef g(): return 6\nrun = lambda: A.f()", "g", 6),
    "property": ("class A:\n @property\n def f(self): return g()\ndef g(): return 6\nrun = lambda: A().f", "g", 6),
    "wrapped": (
        "import functools\ndef d(h):\n @functools.wraps(h)\n def w(*a): return h(*a)\n return w\n"
        "@d\ndef f(): return g()\ndef g(): return 6\nrun = lambda: f()",
        "g",
        6,
    ),
    "wrapped without a trace": (
        "def d(h): return lambda: h()\n@d\ndef f(): return g()\ndef g(): return 6\nrun = lambda: f()",
        "g",
        6,
    ),
    "triton launch": (
        "class K:\n def __getitem__(s, i): return lambda a: a\nk = K()\ndef run(): return k[(1,)](9)",
        "k[1,]",
        9,
    ),
    "future annotations": (
        "from __future__ import annotations\ndef g(): return 6\ndef run() -> Nope: return g()",
        "g",
        6,
    ),
    "f-string": ("def g(): return 6\ndef run(): return f'{g()}!'", "g", "6!"),
    "with": ("import io\ndef run():\n with io.StringIO('x') as s:\n  return s.read()", "io.StringIO", "x"),
    "lambda inside": ("def g(): return 6\ndef run(): return (lambda: g())()", "g", 6),
    "decorator factory call": (
        "def g(x): return x\ndef run():\n @g(lambda h: h)\n def h(): return 2\n return h()",
        "g",
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrapped_call_gives_the_same_result_and_is_seen(case: str) -> None:
    source, callee, expected = CASES[case]
    callee = next(
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) == callee or (case == "triton launch" and ast.unparse(node.func).startswith("k[")))
    )
    module, seen, refused = probed(source, Mark(callee, "p"))
    assert refused == []
    assert module.run() == expected
    assert seen and all(entry[0] == "p" for entry in seen)


def test_result_of_the_call_is_what_the_probe_gets() -> None:
    module, seen, _ = probed("def g(x): return x * 2\ndef run(): return [g(x) for x in (1, 2)]", Mark("g"))
    module.run()
    assert seen == [("g", 2), ("g", 4)]


def test_nested_points_are_both_wrapped() -> None:
    module, seen, _ = probed(
        "def g(x): return x + 1\ndef h(x): return x * 10\ndef run(): return h(g(1))", Mark("g"), Mark("h")
    )
    assert module.run() == 20
    assert seen == [("g", 2), ("h", 20)]


def test_await_is_wrapped_around_the_await() -> None:
    source = """
    import asyncio
    async def g(x):
        await asyncio.sleep(0)
        return x + 1
    async def run():
        return await g(4)
    """
    module, seen, refused = probed(source, Mark("g"))
    assert refused == []
    assert asyncio.run(module.run()) == 5
    assert seen == [("g", 5)], "the probe must see the result, not a coroutine"


def test_line_numbers_and_traceback_text_stay() -> None:
    source = "def g(x):\n    raise ValueError(x)\n\ndef run():\n    y = 1\n    return g(\n        y,\n    )\n"
    plain = types.ModuleType("plain")
    exec(compile(source, "sample.py", "exec", dont_inherit=True), plain.__dict__)
    module, seen, _ = probed(source, Mark("g"))
    lines = []
    for run in (plain.run, module.run):
        with pytest.raises(ValueError) as caught:
            run()
        lines.append([(frame.name, frame.lineno) for frame in traceback.extract_tb(caught.value.__traceback__)[1:]])
    assert lines[0] == lines[1]
    assert seen == [], "a call that raised has no end"


def test_body_point_times_the_whole_function_through_return_and_raise() -> None:
    source = '''
    class A:
        def f(self, xs, *, k=2):
            """doc"""
            if not xs:
                raise KeyError(k)
            for x in xs:
                if x > 1:
                    return [x]
    '''
    values = {"n": "arg0|len", "k": "kw.k", "out": "return|len", "me": "self.x"}
    module, seen, refused = probed(source, Mark("A.f", "body", kind="body", values=values))
    a = module.A()
    assert refused == []
    assert a.f([1, 2]) == [2]
    assert a.f([1]) is None
    with pytest.raises(KeyError):
        a.f([])
    assert a.f.__doc__ == "doc"
    assert [entry[1] for entry in seen] == [[2], None, None]
    assert seen[0][2:] == ([1, 2], 2, a)


def test_body_with_only_a_docstring_or_a_nested_return() -> None:
    source = "def e():\n 'd'\ndef f():\n def g(): return 1\n class C: pass\n lambda: 2\n return g()"
    module, seen, refused = probed(
        source, Mark("e", kind="body", values={"r": "return"}), Mark("f", kind="body", values={"r": "return"})
    )
    assert refused == [] and module.e() is None and module.f() == 1
    assert seen == [("e", None), ("f", 1)]


@pytest.mark.parametrize(
    "body",
    [
        "try: g()\n except OSError as req: pass",
        "import os as req",
        "from os import path as req",
        "def req(): pass",
        "class req: pass",
        "del req",
        "for req in (): pass",
        pytest.param("match g():\n  case [req]: pass", marks=MATCH),
        pytest.param("match g():\n  case {**req}: pass", marks=MATCH),
        pytest.param("match g():\n  case [*req]: pass", marks=MATCH),
    ],
)
def test_a_parameter_that_is_bound_anew_is_no_root(body: str) -> None:
    """``except ... as NAME`` deletes it, and the probe's own read of it would raise in the server."""
    source = f"def g(): raise OSError\ndef f(req):\n {body}\n return 1"
    _module, _seen, refused = probed(source, Mark("f", kind="body", values={"n": "arg0"}))
    assert refused == ["value root arg0: the function binds or deletes req anew"]


def test_value_roots_are_names_read_after_the_call() -> None:
    source = "class A:\n def f(self, b):\n  return self.g(b.reqs, k=self.n)\n def g(self, r, k): return 1\n"
    module, seen, refused = probed(
        source, Mark("self.g", values={"n": "arg0|len", "k": "kw.k", "s": "self.z", "r": "return"})
    )
    assert refused == []
    a, b = module.A(), types.SimpleNamespace(reqs=[1])
    a.n = 3
    assert a.f(b) == 1
    assert seen == [("self.g", 1, b, a, a)]


REFUSALS = {
    "frame callee locals": ("def run():\n return locals()", "locals", "looks at the frame"),
    "frame callee getframe": (
        "import sys\ndef run():\n return sys._getframe(1)",
        "sys._getframe",
        "looks at the frame",
    ),
    "frame callee warn": (
        "import warnings\ndef run():\n warnings.warn('x', stacklevel=2)",
        "warnings.warn",
        "looks at",
    ),
    "super": ("class A:\n def f(self): return super()", "super", "looks at"),
    "eval": ("def run(): return eval('1')", "eval", "looks at"),
    "generator": ("def g(): pass\ndef run():\n yield g()", "g", "is a generator"),
    "async generator": ("def g(): pass\nasync def run():\n yield g()", "g", "is a generator"),
    "coroutine not awaited": ("async def g(): pass\ndef run(): return g()", "g", "only creates a coroutine"),
    "generator created": ("def g(): yield 1\ndef run(): return g()", "g", "only creates a generator"),
    "torch.compile": (
        "import torch\n@torch.compile(fullgraph=True)\ndef run(): return g()",
        "g",
        "belongs to a compiler",
    ),
    "triton": ("@triton.jit\ndef run(): return g()", "g", "belongs to a compiler"),
    "vllm model": ("@support_torch_compile\nclass M:\n def forward(self): return g()", "g", "belongs to a compiler"),
    "endless": ("def run():\n while True:\n  g()", "g", "loops for ever"),
    "module level": ("def g(): pass\ng()", "g", "not inside a function"),
    "class level": ("def g(): pass\nclass A:\n x = g()", "g", "not inside a function"),
    "lambda": ("run = lambda: g()", "g", "lambda"),
    "value of a constant": ("def run(): return g(3)", "g", "neither a name"),
    "value not passed": ("def run(): return g()", "g", "no such positional"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_the_reason(case: str) -> None:
    source, callee, reason = REFUSALS[case]
    values = {"v": "arg0"} if case.startswith("value") else {}
    points = plan_points(source.encode(), "s.py", "s", [Mark(callee, values=values)])
    answer = rewrite_module(ast.parse(source), "s.py", "s", "", points)
    assert [refusal["id"] for refusal in answer["refused"]] == [1]
    assert reason in answer["refused"][0]["reason"]
    assert marshal.loads(answer["blob"])["functions"] == []


def test_a_loop_that_can_be_left_is_not_endless() -> None:
    module, seen, refused = probed("def g(): return 1\ndef run():\n while True:\n  if g(): break\n return 2", Mark("g"))
    assert refused == [] and module.run() == 2 and len(seen) == 1


def test_two_points_that_claim_one_call() -> None:
    source = "def g(): pass\ndef run(): return g()"
    points = plan_points(source.encode(), "s.py", "s", [Mark("g", "one"), Mark("g", "two")])
    answer = rewrite_module(ast.parse(source), "s.py", "s", "", points)
    assert [(refusal["id"], refusal["reason"]) for refusal in answer["refused"]] == [
        (2, "point one claims the same call")
    ]


def test_a_position_without_a_call_is_refused() -> None:
    source = "def g(): pass\ndef run(): return g()"
    (point,) = plan_points(source.encode(), "s.py", "s", [Mark("g")])
    answer = rewrite_module(ast.parse(source), "s.py", "s", "", [{**point, "col": point["col"] + 1}])
    assert "no such call" in answer["refused"][0]["reason"]


def test_cycle_code_holds_the_cycle_point_alone() -> None:
    source = "def g(): return 1\ndef run():\n return g() + h()\ndef h(): return k()\ndef k(): return 1"
    points = plan_points(source.encode(), "s.py", "s", [Mark("g", "cycle", role="cycle"), Mark("h"), Mark("k")])
    content = marshal.loads(rewrite_module(ast.parse(source), "s.py", "s", "", points)["blob"])
    entries = {entry["qualname"]: entry for entry in content["functions"]}
    consts = [const for const in entries["run"]["cycle_code"].co_consts if isinstance(const, str)]
    assert sorted(consts) == ["\0specmeter.begin:1", "\0specmeter.end:1", "\0specmeter.thread", "\0specmeter.word:1"]
    assert entries["h"]["cycle_code"] is None


FRAMES = {
    "function": ("def run():\n  'Text.'\n  return [g(1), g(2), g(3)]", 1),
    "loop": ("def run():\n  for i in range(50): g(i)", 1),
    "body": ("def run(): return f(1) or f(2)\ndef f(n):\n  g(n); g(n)", 2),
    "method": ("class A:\n  def f(self): g(1); return g(2)\ndef run(): A().f()", 1),
    "closure": ("def run():\n  def f(): g(2); g(3)\n  g(1); f(); f()", 3),
    "default": ("def run():\n  def f(n=g(1)): return n\n  return g(f())", 1),
    "lambda": ("def run(): return (lambda: g(1) + g(2))()", 0),
    "comprehension": ("def run(): return [g(i) for i in range(9)]", 0),
    "class body": ("def run():\n  class A: x = g(1)", 0),
    "coroutine": ("async def f(): return g(1) + g(2)\nrun = lambda: asyncio.run(f())", 0),
    "own frame": ("def run():\n  x = g(1) + g(2)\n  assert sorted(sys._getframe().f_locals) == ['x']", 0),
    "own names in a default": ("def run():\n  x = g(1)\n  def f(n=locals()): return n\n  assert list(f()) == ['x']", 0),
    "another's names": ("def run():\n  def f(): return locals()\n  return g(f()), g(2)", 1),
    "own names": ("def run():\n  x = g(1) + g(2)\n  assert sorted(locals()) == ['x']", 0),
}


@pytest.mark.parametrize("case", FRAMES)
def test_the_thread_is_asked_for_once_a_frame(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of C code at every probe is what it saves; elsewhere than in plain functions it is not known."""
    source, asked = FRAMES[case]
    calls: list[int] = []
    monkeypatch.setattr(swap, "get_ident", lambda: calls.append(1) or threading.get_ident())
    source += "\ndef g(n): return n\nimport asyncio, sys"
    marks = [Mark("g"), Mark("f", kind="body")] if case == "body" else [Mark("g")]
    module, seen, refused = probed(source, *marks)
    module.run()
    assert refused == [] and len(seen) > 0
    assert len(calls) == asked


def test_no_warning_reaches_the_caller() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = "def g(): pass\ndef run(): return g()"
        rewrite_module(ast.parse(source), "s.py", "s", "", plan_points(source.encode(), "s.py", "s", [Mark("g")]))


def test_same_name_twice_is_told_apart_by_line() -> None:
    source = """
    class A:
        @property
        def x(self): return g(1)
        @x.setter
        def x(self, v): self.v = g(v)
    def g(v): return v
    """
    module, seen, refused = probed(source, Mark("g"))
    a = module.A()
    a.x = 5
    assert refused == [] and (a.x, a.v) == (1, 5)
    assert seen == [("g", 5), ("g", 1)]
