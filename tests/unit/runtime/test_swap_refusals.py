"""What a live function must be to take its probed code, and that one behind torch's own decorator takes it."""

from __future__ import annotations

import types

import pytest

from specmeter.runtime.swap import CannotSwap, find_functions


def live(text: str) -> types.ModuleType:
    module = types.ModuleType("live")
    exec(compile(text, "/place/live.py", "exec"), module.__dict__)
    return module


def code_of(text: str, *names: str) -> types.CodeType:
    code = compile(text, "/place/live.py", "exec")
    for name in names:
        (code,) = [item for item in code.co_consts if isinstance(item, types.CodeType) and item.co_name == name]
    return code


CLOSED = "def make():\n    a = b = 1\n    def step(x):\n        return x + {}\n    return step\nstep = make()\n"
REFUSED = {
    "a free variable more": (CLOSED.format("a"), CLOSED.format("a + b"), "free variables would change"),
    "a free variable less": (CLOSED.format("a"), CLOSED.format("1"), "free variables would change"),
    "another parameter": (CLOSED.format("a"), CLOSED.format("a").replace("step(x)", "step(x, y=1)"), "parameters"),
    "another name of one": (CLOSED.format("a"), CLOSED.format("a").replace("(x)", "(z)").replace("x +", "z +"), "par"),
    "a star": (CLOSED.format("a"), CLOSED.format("a").replace("step(x)", "step(x, *y)"), "parameters"),
    "a line further down": (CLOSED.format("a"), "\n" + CLOSED.format("a"), "no live function"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_code_that_does_not_fit_the_live_function_is_refused(case: str) -> None:
    before, after, reason = REFUSED[case]
    module = live(before)
    own = module.step.__code__
    with pytest.raises(CannotSwap, match=reason):
        find_functions(module, "step", code_of(after, "make", "step"))
    assert module.step.__code__ is own
    assert find_functions(module, "step", code_of(before, "make", "step")) == [module.step]


def test_a_function_that_was_replaced_is_refused() -> None:
    text = "def step(x):\n    return x\n"
    module = live(text + "step = len\n")
    with pytest.raises(CannotSwap, match="it was replaced"):
        find_functions(module, "step", code_of(text, "step"))


@pytest.mark.parametrize("decorator", ["torch.inference_mode()", "torch.no_grad()", "torch.inference_mode"])
def test_a_method_behind_torch_s_decorator(decorator: str) -> None:
    pytest.importorskip("torch")
    text = (
        "import torch\nclass Base:\n    def step(self, x): return x\nclass W(Base):\n"
        f"    @{decorator}\n    def step(self, x):\n        return super().step(x) + self.__plus()\n"
        "    def __plus(self): return torch.is_grad_enabled()\n"
    )
    module = live(text)
    (function,) = find_functions(module, "W.step", code_of(text, "W", "step"))
    assert module.W().step(1) == 1 and function is module.W.step.__wrapped__
    original = function.__code__
    function.__code__ = original.replace(co_filename="/elsewhere.py")
    assert module.W().step(1) == 1 and function.__code__ is not original
    function.__code__ = original
    assert module.W().step(1) == 1 and module.W.step.__wrapped__.__code__ is original
