"""Puts probes into one module's syntax tree and compiles the functions that carry them.

Runs under the server's own interpreter (standard library of CPython 3.9). A call ``f(a)`` of point 7 becomes
``"\\0specmeter.end:7"("\\0specmeter.begin:7"(), f(a), "\\0specmeter.word:7", THREAD)``: string constants, which the
runtime replaces in ``co_consts`` by its functions and the point's number, placed where a record has it. The thread is
asked for once, where the function begins (None in other frames than a plain function's). Line numbers stay, so
tracebacks are those of the unprobed source.
"""

from __future__ import annotations

import ast
import copy
import marshal
import sys
import warnings
from types import CodeType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from .placer import Placer

FORMAT = 4


def rewrite_module(
    tree: ast.Module,
    path: str,
    module: str,
    sha256: str,
    points: Sequence[Mapping[str, Any]],
    imported: Optional[Mapping[str, str]] = None,
) -> Dict[str, Any]:
    """Put ``points`` (plan entries with exact positions) into ``tree`` and compile the functions that hold them.

    ``tree`` is the parsed module and is changed in place. A position is ``line``, ``col``, ``end_line``, ``end_col`` of
    the call (or, for kind ``body``, of the ``def``) as the ``ast`` module of this interpreter gives it.
    ``imported`` names functions of other files whose call does no work, with what it creates (``lazy_functions``).
    Gives ``{"blob": contents of code/MODULE.bin, "refused": [{"id", "reason"}]}``: a point that cannot be placed is
    refused with the reason, the others are placed.
    """
    cycles = [point for point in points if point.get("role") == "cycle"]
    spare = copy.deepcopy(tree) if cycles and len(cycles) < len(points) else None
    placer = _place(tree, points, imported or {})
    codes = _compile(tree, path) if placer.done else {}
    ids_of_cycles = {point["id"] for point in cycles}
    alone = {key: codes[key] for key, ids in placer.functions.items() if ids <= ids_of_cycles}
    if spare is not None and placer.done:
        shared = _shared(placer.functions, ids_of_cycles)
        if shared:
            _place(spare, cycles, imported or {})
            compiled = _compile(spare, path)
            alone.update({key: compiled[key] for key in shared})
    functions = [
        {"qualname": key[0], "line": key[1], "code": codes[key], "points": sorted(ids), "cycle_code": alone.get(key)}
        for key, ids in placer.functions.items()
    ]
    content = {
        "format": FORMAT,
        "module": module,
        "sha256": sha256,
        "optimize": sys.flags.optimize,
        "functions": functions,
        "roots": placer.done,
    }
    return {"blob": marshal.dumps(content), "refused": placer.refusals(points)}


def _place(tree: ast.Module, points: Sequence[Mapping[str, Any]], imported: Mapping[str, str]) -> Placer:
    placer = Placer(tree, points)
    placer.lazy = {**imported, **placer.lazy}
    placer.visit(tree)
    ast.fix_missing_locations(tree)
    return placer


def _shared(functions: Mapping[Tuple[str, int], Set[int]], cycles: Set[int]) -> List[Tuple[str, int]]:
    """Functions that hold a cycle point and others: "probes out" means code with the cycle point alone there."""
    return [key for key, ids in functions.items() if ids & cycles and ids - cycles]


def _compile(tree: ast.Module, path: str) -> Dict[Tuple[str, int], CodeType]:
    """Compile, and give the outermost functions' code objects by (qualname, first line)."""
    with warnings.catch_warnings():
        # A string constant in function position: "'str' object is not callable; perhaps you missed a comma?"
        warnings.simplefilter("ignore")
        code = compile(tree, path, "exec", dont_inherit=True)
    found: Dict[Tuple[str, int], CodeType] = {}
    _collect(code, "", found)
    return found


def _collect(code: CodeType, prefix: str, found: Dict[Tuple[str, int], CodeType]) -> None:
    for const in code.co_consts:
        if not isinstance(const, CodeType):
            continue
        name = const.co_name
        if name.startswith("<generic parameters of "):
            _collect(const, prefix, found)  # PEP 695: the function itself is one level further in
        elif const.co_flags & 0x1:  # CO_OPTIMIZED: a function; a class body is not
            found[(prefix + name, const.co_firstlineno)] = const
        else:
            _collect(const, prefix + name + ".", found)
