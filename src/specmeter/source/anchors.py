"""Anchors: how a point is found in source by structure, and what is said when it is not there.

An anchor is a dict with the keys

``module``    dotted name of the module
``function``  qualified name of the enclosing function, as ``__qualname__`` writes it (``outer.<locals>.inner``)
``call``      regular expression searched in the unparsed callee (kind ``call`` only)
``inside``    ``for``, ``while`` or ``with``: such a statement encloses the call within the function; ``none``: no
              loop does. ``for`` covers ``async for`` and comprehensions. A loop's iterable, a ``with``'s context
              expression and an ``else`` branch lie outside; a ``while``'s condition lies inside.
``args``      regular expression searched in the unparsed arguments, joined by ``, ``
``sites``     how many calls must match (1 unless given)
``range``     versions of the engine that the anchor is for (all unless given)
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from .locate import Located, locate
from .pyfile import PyFile, SourceError, read
from .tree import Call, FunctionNode, calls, functions

LOOPS = frozenset(("for", "while"))
INSIDE = ("for", "while", "with", "none")
_TEXT_LIMIT = 160


@dataclass(frozen=True)
class Site:
    """One place in a file. Lines count from 1, columns are UTF-8 byte offsets as in ``ast``."""

    module: str
    path: str
    sha256: str
    qualname: str
    function_line: int
    line: int
    col: int
    end_line: int
    end_col: int
    text: str


@dataclass(frozen=True)
class Refusal:
    """Why an anchor has no site: the reason, how far the search got, and the nearest candidates."""

    reason: str
    reached: str
    nearest: Tuple[str, ...] = ()


class Module:
    """One located and parsed module; calls of a function are listed at the first question about it."""

    def __init__(self, located: Located) -> None:
        self.located = located
        self.file: PyFile = read(located.path)
        self.tree: ast.Module = self.file.tree()
        self.functions: Dict[str, List[FunctionNode]] = functions(self.tree)
        self._calls: Dict[str, List[Tuple[FunctionNode, Call]]] = {}
        self._lines: Optional[List[bytes]] = None

    def calls(self, qualname: str) -> List[Tuple[FunctionNode, Call]]:
        """Every call in the bodies of the functions of that name, with its function."""
        if qualname not in self._calls:
            found = [(node, call) for node in self.functions[qualname] for call in calls(node)]
            self._calls[qualname] = found
        return self._calls[qualname]

    def text(self, node: Union[ast.Call, FunctionNode]) -> str:
        """The node's source on one line, cut to 160 characters; for a function its ``def`` line."""
        if self._lines is None:
            self._lines = [line.encode("utf-8", "replace") for line in self.file.lines()]
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        if not isinstance(node, ast.Call):
            return self._lines[first].decode("utf-8", "replace").strip()[:_TEXT_LIMIT]
        picked = self._lines[first : last + 1]
        picked[-1] = picked[-1][: node.end_col_offset]
        picked[0] = picked[0][node.col_offset :]
        text = " ".join(part.decode("utf-8", "replace").strip() for part in picked)
        return text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 1] + "…"


class Resolver:
    """Resolves anchors against the files found along ``entries``; each file is read and parsed once."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = entries
        self._modules: Dict[str, Union[Module, SourceError]] = {}

    def module(self, name: str) -> Module:
        """The parsed module. Raises SourceError with the reason when it cannot be had."""
        if name not in self._modules:
            try:
                located = locate(name, self._entries)
                try:
                    self._modules[name] = Module(located)
                except SourceError as error:  # the file is there: the search got that far
                    self._modules[name] = SourceError(error.reason, error.reached or name, error.nearest)
            except SourceError as error:
                self._modules[name] = error
        found = self._modules[name]
        if isinstance(found, SourceError):
            raise found
        return found

    def resolve(self, anchor: Mapping[str, Any], kind: str) -> Union[List[Site], Refusal]:
        """The anchor's sites, as many as it states, or the refusal."""
        name, qualname = anchor["module"], anchor["function"]
        try:
            module = self.module(name)
        except SourceError as error:
            return Refusal(error.reason, error.reached, error.nearest)
        if module.located.zipped and kind:
            return Refusal(f"{module.located.path} is inside a zip archive: its code cannot be replaced", name)
        if qualname not in module.functions:
            return Refusal(f"no function {qualname} in {name}", name, _near_functions(qualname, module))
        wanted = anchor.get("sites", 1)
        if kind == "body":
            nodes: List[Tuple[FunctionNode, Union[ast.Call, FunctionNode]]]
            nodes = [(node, node) for node in module.functions[qualname]]
        else:
            nodes = [(node, call.node) for node, call in module.calls(qualname) if _matches(call, anchor)]
        if len(nodes) != wanted:
            return _miscount(module, anchor, len(nodes), wanted)
        holders = {function.lineno for function, _ in nodes}
        if kind == "call" and len(holders) > 1:  # alternatives, of which one is live: together they are no set of calls
            reason = f"the {wanted} calls are in {len(holders)} definitions of {qualname}, not in one"
            return Refusal(reason, f"{name}:{qualname}", tuple(f"line {line}" for line in sorted(holders)))
        return [_site(module, qualname, function, node) for function, node in nodes]


def _matches(call: Call, anchor: Mapping[str, Any]) -> bool:
    if not re.search(anchor["call"], call.callee):
        return False
    inside = anchor.get("inside")
    if inside == "none" and call.around & LOOPS:
        return False
    if inside in ("for", "while", "with") and inside not in call.around:
        return False
    return not anchor.get("args") or re.search(anchor["args"], call.arguments()) is not None


def _site(module: Module, qualname: str, function: FunctionNode, node: Union[ast.Call, FunctionNode]) -> Site:
    return Site(
        module=module.located.module,
        path=module.located.path,
        sha256=module.file.sha256,
        qualname=qualname,
        function_line=function.lineno,
        line=node.lineno,
        col=node.col_offset,
        end_line=node.end_lineno or node.lineno,
        end_col=node.end_col_offset or 0,
        text=module.text(node),
    )


def _near_functions(qualname: str, module: Module) -> Tuple[str, ...]:
    last = qualname.rpartition(".")[2]
    same = sorted(name for name in module.functions if name.rpartition(".")[2] == last)
    close = difflib.get_close_matches(qualname, module.functions, 3, 0.6)
    return tuple(dict.fromkeys([*same[:3], *close]))[:4]


def _miscount(module: Module, anchor: Mapping[str, Any], count: int, wanted: int) -> Refusal:
    qualname = anchor["function"]
    reached = f"{anchor['module']}:{qualname}"
    if "call" not in anchor:
        lines = tuple(f"line {node.lineno}" for node in module.functions[qualname])
        return Refusal(f"{count} definitions of {qualname}, not {wanted}", reached, lines)
    where = f" inside {anchor['inside']}" if anchor.get("inside") else ""
    listed = module.calls(qualname)
    matching = [call for _, call in listed if re.search(anchor["call"], call.callee)]
    if not matching:
        bare = re.sub(r"[\\^$?()|\[\]*+]", "", anchor["call"])
        names = {call.callee for _, call in listed}
        tails = difflib.get_close_matches(bare, sorted(names), 3, 0.5)
        matching = [call for _, call in listed if call.callee in tails]
    nearest = tuple(f"line {call.node.lineno}: {call.callee}{_around(call)}" for call in matching[:6])
    return Refusal(f"{count} calls match {anchor['call']!r}{where}, not {wanted}", reached, nearest)


def _around(call: Call) -> str:
    return f" (inside {', '.join(sorted(call.around))})" if call.around else ""
