"""Which code torch.compile owns, told without importing torch: only what the process has loaded itself is asked.

The tracer (torch._dynamo) reads a function's code when it compiles it, or inlines it into a caller that it compiles. A
probe in there would break the trace, so such functions are refused, and while the tracer works the original code is
back.
"""

from __future__ import annotations

import gc
import re
import sys
from types import CodeType
from typing import Any, Callable, Dict, Iterable, List, Set

HANDED = "it belongs to torch.compile (it, or the module it is part of, was handed to it)"
_TRACER = "torch._dynamo.convert_frame"
TRACER_MODULES = (_TRACER,)
_GUARDED = re.compile(r"__code__, (\d+)\)")
_ATTRIBUTE = "_torchdynamo_orig_callable"


def loaded() -> bool:
    """Whether the tracer is in this process."""
    return _TRACER in sys.modules


def owned(codes: Iterable[CodeType]) -> Dict[int, str]:
    """The ids of those of ``codes`` (functions' original code) that torch.compile owns, each with the reason."""
    wanted = {id(code): code for code in codes}
    if not loaded() or not wanted:
        return {}
    found: Dict[int, str] = {}
    for check in (_wrapped, _inlined, _traced):
        for number in check() & set(wanted):
            found[number] = _REASONS[check]
    return found


def keep_out(code: CodeType) -> None:
    """Tell the tracer never to compile ``code`` (probed code) or what is nested in it: it runs as it stands."""
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is None:
        return
    skip(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            keep_out(const)


def follow(handed: Callable[[Set[int]], None], begins: Callable[[], None], ends: Callable[[], None]) -> bool:
    """Have these called from now on: ``handed`` with the ids of the code handed to torch.compile, before it wraps them,
    ``begins`` and ``ends`` around each compilation. They may raise nothing. False where this torch cannot do that.
    """
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    context = _context()
    if handler is None or context is None or not hasattr(handler, "register_end_callback"):
        return False
    # Some releases hand the callbacks an argument.
    handler.register_start_callback(lambda *_: begins())
    handler.register_end_callback(lambda *_: ends())
    original: Any = vars(context)["__call__"]

    def call(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            ids: Set[int] = set()
            _add(fn, ids)
            handed(ids)
        except Exception:
            pass  # torch.compile goes its way
        return original(self, fn, *args, **kwargs)

    call.__wrapped__ = original  # type: ignore[attr-defined]
    context.__call__ = call
    return True


def leave() -> None:
    """Give torch.compile its own entry back."""
    context = _context()
    call: Any = vars(context).get("__call__") if context is not None else None
    if call is not None and hasattr(call, "__wrapped__") and call.__code__.co_filename == __file__:
        context.__call__ = call.__wrapped__


def _context() -> Any:
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "_TorchDynamoContext", None)


def _traced() -> Set[int]:
    """The code objects that the tracer has compiled, or has tried to."""
    return set(getattr(getattr(sys.modules[_TRACER], "input_codes", None), "seen_ids", ()))


def _inlined() -> Set[int]:
    """The code objects whose identity a compiled frame's guards check: they are part of its graph."""
    native = sys.modules.get("torch._C._dynamo.eval_frame")
    entries = getattr(native, "_debug_get_cache_entry_list", None)
    seen = getattr(getattr(sys.modules[_TRACER], "input_codes", None), "seen", ())
    ids: Set[int] = set()
    if entries is None:
        return ids
    for reference in list(seen):
        code = reference()
        for entry in entries(code) if code is not None else ():
            ids.update(int(number) for number in _GUARDED.findall(str(entry.guard_manager)))
    return ids


def _wrapped() -> Set[int]:
    """The code of every live function or module handed to torch.compile, its submodules' forward included."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    module_class: Any = getattr(frames, "OptimizedModule", None)
    context = _context()
    call: Any = vars(context).get("__call__") if context is not None else None
    call = getattr(getattr(call, "__wrapped__", call), "__code__", None)
    # One pass over the collector's objects finds all wrappers: they share the code of one nested function.
    wrappers = [const for const in call.co_consts if isinstance(const, CodeType)] if call is not None else []
    ids: Set[int] = set()
    for holder in gc.get_referrers(*wrappers, *([module_class] if module_class is not None else [])):
        space = getattr(holder, "__dict__", None)
        if not isinstance(space, dict):
            continue
        if _ATTRIBUTE in space:
            _add(space[_ATTRIBUTE], ids)
        elif module_class is not None and type(holder) is module_class:
            _add(space.get("_modules", {}).get("_orig_mod"), ids)
    return ids


def _add(target: Any, ids: Set[int]) -> None:
    function = getattr(target, "__func__", target)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        ids.add(id(code))
    stack: List[Any] = [getattr(target, "__self__", target)]
    while stack:
        module = stack.pop()
        forward = getattr(getattr(type(module), "forward", None), "__code__", None)
        if isinstance(forward, CodeType):
            ids.add(id(forward))
        inner = getattr(module, "__dict__", {}).get("_modules")
        if isinstance(inner, dict):
            stack.extend(child for child in inner.values() if child is not None)


_REASONS = {
    _traced: "torch.compile has traced it: a probe inside would break the compiled code",
    _inlined: "torch.compile has inlined it into a compiled caller: a probe inside would break the compiled code",
    _wrapped: HANDED,
}
