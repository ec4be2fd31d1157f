"""NVTX ranges: each host span shows in a profiler of the vendor's under its point's name.

Goes through ``torch.cuda.nvtx`` if the process has imported torch with CUDA, and imports nothing by itself. Ranges of a
thread nest, so every push gets its pop: at the span's end; where the call raises, when Python drops the token that the
begin gave, which it does while the exception passes; and with the range around it at the latest.
"""

from __future__ import annotations

import sys
from _thread import _local
from typing import Any, Callable, Dict, List, Optional, Tuple

from .writers import ours

Begin = Callable[[], int]
End = Callable[..., Any]


class Token(int):
    """What a span's begin gave (an int), with the stack of open ranges that it lies on."""

    inner: int = 0
    stack: Optional[List[int]] = None
    ranges: Optional[Ranges] = None

    def __del__(self) -> None:
        try:
            if self.stack is not None and self.ranges is not None:
                self.ranges.close(self)
        except Exception:
            pass  # Python would print it on the server's standard error


class Ranges:
    """Wraps the begin and end functions of points. A failure turns the ranges off for good; ``reason`` says why.

    ``open`` and ``close`` raise nothing.
    """

    def __init__(self) -> None:
        self.reason = "no point has run"
        self.pushed = 0
        self._nvtx: Any = None
        self._off = False
        self._local: Any = _local()

    def pair(self, name: str, begin: Begin, end: End) -> Tuple[Begin, End]:
        """A point's ``begin`` and ``end`` with a range called ``name`` around them."""

        def ranged_begin() -> int:
            try:
                if not self._off:
                    return self.open(name, begin)
            except Exception as error:
                if not ours(error):
                    raise
                self._stop(error)
            return begin()

        def ranged_end(t0: int, result: Any, id: int, *roots: Any) -> Any:
            if type(t0) is not Token:
                return end(t0, result, id, *roots)
            given = end(t0.inner, result, id, *roots)
            try:
                self.close(t0)
            except Exception as error:
                if not ours(error):
                    raise
                self._stop(error)
            return given

        return ranged_begin, ranged_end

    def open(self, name: str, begin: Begin) -> int:
        """Push a range, then begin the span: the push is not part of it."""
        if self._nvtx is None and not self._find():
            return begin()
        try:
            stack: Optional[List[int]] = getattr(self._local, "stack", None)
            if stack is None:
                stack = self._local.stack = []
            self._nvtx.range_push(name)
            self.pushed += 1
        except Exception as error:
            self._stop(error)
            return begin()
        token = None
        try:
            inner = begin()
            token = Token(inner)
            token.inner, token.stack, token.ranges = inner, stack, self
            stack.append(id(token))
            return token
        finally:
            if token is None:
                self._pop()  # what a signal handler of the server raised passes through here

    def close(self, token: Token) -> None:
        """Pop the token's range and those that were left open inside it. Nothing on another thread than its own."""
        stack, mine = token.stack, id(token)
        token.stack = None
        here: Any = getattr(self._local, "stack", None)
        if stack is None or stack is not here or mine not in here:
            return
        while stack and stack.pop() != mine:
            self._pop()
        self._pop()

    def describe(self) -> Dict[str, Any]:
        """For the process's report: why there are no ranges (empty: there are), and how many were pushed."""
        return {"reason": self.reason, "pushed": self.pushed}

    def _pop(self) -> None:
        try:
            # Also when off: what was pushed is popped.
            self._nvtx.range_pop()
        except Exception as error:
            self._stop(error)

    def _find(self) -> bool:
        try:
            torch = sys.modules.get("torch")
            nvtx = sys.modules.get("torch.cuda.nvtx")
            if torch is None or nvtx is None:
                self.reason = "torch is not imported"  # it may be later
                return False
            if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
                self._off, self.reason = True, "torch is a build without CUDA: it has no NVTX"
                return False
        except Exception as error:
            self._stop(error)
            return False
        self._nvtx, self.reason = nvtx, ""
        return True

    def _stop(self, error: BaseException) -> None:
        self._off = True
        try:
            self.reason = f"{type(error).__name__}: {error}"
        except Exception:
            pass  # the server comes first
