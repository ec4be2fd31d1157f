"""Finds the live function objects of a rewritten function and exchanges their code."""

from __future__ import annotations

import gc
import sys
from _thread import get_ident
from types import CodeType, FunctionType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from . import compilers, layout

BEGIN = "\0specmeter.begin:"
END = "\0specmeter.end:"
WORD = "\0specmeter.word:"
THREAD = "\0specmeter.thread"
_DEPTH = 12
_NO_CLOSURES = frozenset(["<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"])
Pair = Tuple[Callable[[], int], Callable[..., Any]]


class CannotSwap(Exception):
    """Why a function cannot carry its points."""


def find_functions(module: ModuleType, qualname: str, new: CodeType) -> List[FunctionType]:
    """The live functions that run the original of ``new``, looked for behind decorators and descriptors.

    Falls back to a scan of all function objects. Raises CannotSwap when there is none, or when the live code has other
    free variables or parameters than the rewritten one.
    """
    found: Dict[int, FunctionType] = {}
    holder: Any = module
    *outer, last = qualname.split(".")
    for name in outer:
        holder = vars(holder).get(name) if hasattr(holder, "__dict__") else None
    # Below a replaced class (a decorator may have made a new one) the inherited namespaces are looked through too.
    spaces = [vars(base) for base in holder.__mro__] if isinstance(holder, type) else [getattr(holder, "__dict__", {})]
    for space in spaces:
        if last in space:
            _collect(space[last], new, found, set(), 0)
    if not found:
        for candidate in gc.get_objects():
            if type(candidate) is FunctionType and same_place(candidate.__code__, new):
                found[id(candidate)] = candidate
    if not found:
        raise CannotSwap("no live function runs the code of that line: it was replaced, or it is not defined here")
    for function in found.values():
        check_compatible(function.__code__, new)
    return list(found.values())


def same_place(code: CodeType, new: CodeType) -> bool:
    """Whether two code objects come from the same definition."""
    return (
        code.co_firstlineno == new.co_firstlineno
        and code.co_name == new.co_name
        and (
            code.co_filename == new.co_filename
            or code.co_filename.rpartition("/")[2] == new.co_filename.rpartition("/")[2]
        )
    )


def check_compatible(old: CodeType, new: CodeType) -> None:
    """Raise CannotSwap unless ``new`` can stand in for ``old`` in a live function."""
    if old.co_freevars != new.co_freevars:
        raise CannotSwap(f"its free variables would change from {old.co_freevars} to {new.co_freevars}")
    count = old.co_argcount + old.co_kwonlyargcount
    parameters = (old.co_argcount, old.co_posonlyargcount, old.co_kwonlyargcount, old.co_flags & 0x2AC)
    others = (new.co_argcount, new.co_posonlyargcount, new.co_kwonlyargcount, new.co_flags & 0x2AC)
    if parameters != others or old.co_varnames[:count] != new.co_varnames[:count]:
        raise CannotSwap("its parameters are not those of the source")


def bind(code: CodeType, pairs: Dict[int, Pair], filename: str) -> CodeType:
    """``code`` with its placeholder constants replaced by the functions of ``pairs`` (by point id), recursively."""
    consts = []
    for const in code.co_consts:
        if isinstance(const, CodeType):
            const = bind(const, pairs, filename)
        elif isinstance(const, str) and const.startswith(BEGIN):
            const = pairs[int(const[len(BEGIN) :])][0]
        elif isinstance(const, str) and const.startswith(END):
            const = pairs[int(const[len(END) :])][1]
        elif isinstance(const, str) and const.startswith(WORD):
            const = int(const[len(WORD) :]) << layout.POINT_SHIFT
        elif isinstance(const, str) and const == THREAD:
            const = get_ident
        consts.append(const)
    return code.replace(co_consts=tuple(consts), co_filename=filename)


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """``code`` and the code objects of the functions defined in it, at any depth, in order."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested_codes(const)


def put_nested(swaps: List[Swap], probed: bool) -> None:
    """Give the functions that were made by a swap's function earlier (closures that live on) the code of now.

    One pass over the collector's objects, only where something else than its outer function's constants refers to such
    code. Objects that the server took from the collector (``gc.freeze``) are not seen: such a closure keeps its code,
    and out of arms that code writes nothing.
    """
    pairs = _nested_pairs(swaps, probed)
    exchange = {id(pair[0]): pair[1] for pair, held in zip(pairs, _held(pairs)) if held}  # noqa: B905 (3.9)
    sources = [pair[0] for pair in pairs if id(pair[0]) in exchange]
    for holder in gc.get_referrers(*sources) if sources else ():
        if type(holder) is FunctionType and id(holder.__code__) in exchange:
            holder.__code__ = exchange[id(holder.__code__)]


def _nested_pairs(swaps: List[Swap], probed: bool) -> List[Tuple[CodeType, CodeType]]:
    """The nested code that is to go, each with the code that is to come in its place."""
    pairs: List[Tuple[CodeType, CodeType]] = []
    for swap in swaps:
        for original in swap.originals:
            for old, new in zip(nested_codes(original), nested_codes(swap.probed)):  # noqa: B905 (3.9)
                if old is not original and old.co_name not in _NO_CLOSURES and _interchangeable(old, new):
                    pairs.append((old, new) if probed else (new, old))
    return pairs


def _references(pairs: List[Tuple[CodeType, CodeType]]) -> List[int]:
    return [sys.getrefcount(pair[0]) for pair in pairs]


def _held(pairs: List[Tuple[CodeType, CodeType]]) -> List[bool]:
    """For the first of each pair, a constant of another code object: whether anything besides that and ``pairs`` refers
    to it. The count for nothing else differs between Python versions, so it is taken from a constant made here.
    """
    outer = compile("lambda: 0", "", "eval")
    (unheld,) = _references([(const, const) for const in outer.co_consts if isinstance(const, CodeType)])
    # That pair held its constant twice.
    return [count > unheld - 1 for count in _references(pairs)]


def _interchangeable(old: CodeType, new: CodeType) -> bool:
    return same_place(old, new) and old.co_freevars == new.co_freevars and old is not new


def running_codes() -> Set[int]:
    """The ids of the code objects of every frame on every thread's stack now (code objects compare by value)."""
    codes: Set[int] = set()
    for frame in sys._current_frames().values():
        at: Any = frame
        while at is not None:
            codes.add(id(at.f_code))
            at = at.f_back
    return codes


def stack_codes() -> Set[int]:
    """The ids of the code objects of the frames on this thread's stack."""
    codes: Set[int] = set()
    at: Any = sys._getframe(1)
    while at is not None:
        codes.add(id(at.f_code))
        at = at.f_back
    return codes


class Swap:
    """One outermost function with its points: the original code, the probed code, and which of them is in.

    ``state`` is ``out``, ``in`` or ``cycle`` (the cycle point alone, while probes go in and out at random). ``reason``
    says why it cannot be armed now, ``compiled`` why never (torch.compile owns it).
    """

    def __init__(self, entry: Dict[str, Any], functions: List[FunctionType], pairs: Dict[int, Pair]) -> None:
        self.qualname: str = entry["qualname"]
        self.points: List[int] = list(entry["points"])
        self.functions = functions
        self.original: CodeType = functions[0].__code__
        self.originals = [function.__code__ for function in functions]
        self.reason = ""
        self.compiled = ""
        self.state = "out"
        self._source: CodeType = entry["code"]
        self._cycle_source: Optional[CodeType] = entry.get("cycle_code")
        self.rebind(pairs)

    def rebind(self, pairs: Dict[int, Pair]) -> None:
        """Make the probed code anew from ``pairs``; what is in stays in."""
        filename = self.original.co_filename
        self.probed: CodeType = bind(self._source, pairs, filename)
        self.cycle_only: Optional[CodeType] = None
        if self._cycle_source == self._source:
            self.cycle_only = self.probed  # it holds cycle points alone
        elif self._cycle_source is not None:
            self.cycle_only = bind(self._cycle_source, pairs, filename)
        self.keep_from_compilers()
        if self.state != "out":
            self.put(self.state)

    def forget(self) -> None:
        """Let the probed code go, for good: code objects are not collected, and its constants lead back to here."""
        self.put("out")
        self.probed, self.cycle_only = self.original, None

    def keep_from_compilers(self) -> None:
        """Have torch.compile, if it is loaded, run the probed code as it stands."""
        for code in (self.probed, self.cycle_only):
            if code is not None:
                compilers.keep_out(code)

    def on_stack(self, running: Set[int], probed: bool) -> bool:
        """Whether a frame of the probed code (or else of the original) is among ``running``, as ids of code objects."""
        codes = [self.probed, self.cycle_only] if probed else self.originals
        return any(id(code) in running for code in codes)

    def put(self, state: str) -> None:
        """Assign the code of ``state`` to every function of this place."""
        for function, original in zip(self.functions, self.originals):  # noqa: B905 (3.9)
            code = original
            if state == "in":
                code = self.probed
            elif state == "cycle" and self.cycle_only is not None:
                code = self.cycle_only
            if function.__code__ is not code:
                function.__code__ = code
        self.state = state


def _collect(value: Any, new: CodeType, found: Dict[int, FunctionType], seen: Set[int], depth: int) -> None:
    """Follow decorators: wrapped functions, descriptors, partials, closure cells, callable objects."""
    if depth > _DEPTH or id(value) in seen or value is None:
        return
    seen.add(id(value))
    if type(value) is FunctionType:
        if same_place(value.__code__, new):
            found[id(value)] = value
            return
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if callable(content) or isinstance(content, (staticmethod, classmethod, property)):
                _collect(content, new, found, seen, depth + 1)
    for name in ("__wrapped__", "__func__", "func", "fget", "fset", "fdel"):
        # Read statically: a descriptor of the server's must not run here.
        inner = _static(value, name)
        if callable(inner):
            _collect(inner, new, found, seen, depth + 1)
    if not isinstance(value, (type, FunctionType, ModuleType)):
        space = getattr(value, "__dict__", None)
        if isinstance(space, dict):
            for inner in list(space.values()):
                if isinstance(inner, FunctionType):
                    _collect(inner, new, found, seen, depth + 1)


def _static(value: Any, name: str) -> Any:
    space = getattr(value, "__dict__", None)
    if isinstance(space, dict) and name in space:
        return space[name]
    if isinstance(value, (staticmethod, classmethod, property)) or type(value).__module__ in ("functools", "builtins"):
        return getattr(value, name, None)
    return None
