"""Puts probes into one module's syntax tree and compiles the functions that carry them.

Runs under the server's own interpreter (standard library of CPython 3.9). A call ``f(a)`` of point 7 becomes
``"\\0specmeter.end:7"("\\0specmeter.begin:7"(), f(a), 7)``: two string constants in function position, which the
runtime replaces in ``co_consts`` by its functions. Line numbers stay, so tracebacks are those of the unprobed source.
"""

from __future__ import annotations

import ast
import copy
import marshal
import sys
import warnings
from types import CodeType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

FORMAT = 2
BEGIN = "\0specmeter.begin:"
END = "\0specmeter.end:"

# Callees that look at the frame or the names around them: a report of the plan would claim a time for a call whose
# meaning depends on where it stands, so these are left alone.
FRAME_SENSITIVE = {
    "locals",
    "globals",
    "vars",
    "eval",
    "exec",
    "dir",
    "super",
    "breakpoint",
    "sys._getframe",
    "_getframe",
}
FRAME_SENSITIVE |= {"inspect.currentframe", "currentframe", "inspect.stack", "inspect.trace", "sys._getframemodulename"}
FRAME_SENSITIVE |= {"warnings.warn", "warn", "warnings.warn_explicit", "sys.exc_info", "sys.settrace", "sys.setprofile"}
# Decorators whose functions are traced or compiled from their code or source, not run as they stand.
COMPILED = ("torch.compile", "torch._dynamo.optimize", "torch.jit.script", "torch.fx.wrap", "triton.jit", "numba.")
COMPILED_LAST = frozenset(["jit", "njit", "script", "support_torch_compile", "kernel", "triton_op"])

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
Scope = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda]
Roots = List[List[Any]]


class _No(Exception):
    """The reason why one point cannot be placed."""


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


def _place(tree: ast.Module, points: Sequence[Mapping[str, Any]], imported: Mapping[str, str]) -> _Placer:
    placer = _Placer(tree, points)
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


class _Placer(ast.NodeTransformer):
    """Wraps the calls and bodies of the points; keeps the enclosing scopes to judge and name each place."""

    def __init__(self, tree: ast.Module, points: Sequence[Mapping[str, Any]]) -> None:
        self.tree = tree
        self.done: Dict[int, Roots] = {}
        self.reasons: Dict[int, str] = {}
        self.functions: Dict[Tuple[str, int], Set[int]] = {}
        self.lazy = lazy_functions(tree)
        self._scopes: List[Scope] = []
        self._calls: Dict[Tuple[int, int, int, int], Mapping[str, Any]] = {}
        self._bodies: Dict[Tuple[int, int], Mapping[str, Any]] = {}
        for point in points:
            self._claim(point)

    def _claim(self, point: Mapping[str, Any]) -> None:
        where = (point["line"], point["col"], point["end_line"], point["end_col"])
        if point["kind"] == "body":
            taken: Any = self._bodies.setdefault(where[:2], point)
        elif point["kind"] == "call":
            taken = self._calls.setdefault(where, point)
        else:
            self.reasons[point["id"]] = f"unknown kind {point['kind']!r}"
            return
        if taken is not point:
            self.reasons[point["id"]] = f"point {taken['name']} claims the same {point['kind']}"

    def refusals(self, points: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
        """The points not placed, in the plan's order."""
        missing = "no such call at that position in this file"
        return [
            {"id": point["id"], "reason": self.reasons.get(point["id"], missing)}
            for point in points
            if point["id"] not in self.done
        ]

    # -- scopes ---------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        for field in ("decorator_list", "bases", "keywords"):
            setattr(node, field, [self.visit(child) for child in getattr(node, field)])
        return self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args = self.visit(node.args)
        self._scopes.append(node)
        node.body = self.visit(node.body)
        self._scopes.pop()
        return node

    def _function(self, node: Function) -> ast.AST:
        # Decorators and defaults run in the scope around the function.
        node.decorator_list = [self.visit(child) for child in node.decorator_list]
        node.args = self.visit(node.args)
        point = self._bodies.get((node.lineno, node.col_offset))
        self._inside(node)
        if point is not None:
            self._scopes.append(node)
            self._try(point, lambda: self._wrap_body(node, point))
            self._scopes.pop()
        return node

    def _inside(self, node: Any) -> ast.AST:
        self._scopes.append(node)
        node.body = [self.visit(child) for child in node.body]
        self._scopes.pop()
        return node  # type: ignore[no-any-return]

    # -- calls ----------------------------------------------------------------------------------------------------

    def visit_Await(self, node: ast.Await) -> ast.AST:
        point = self._calls.get(_where(node.value)) if isinstance(node.value, ast.Call) else None
        point = point or self._calls.get(_where(node))
        if point is None:
            return self.generic_visit(node)
        call = node.value
        self.generic_visit(call)
        return self._try(point, lambda: self._wrap_call(node, call, point)) or node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        point = self._calls.get(_where(node))
        self.generic_visit(node)
        if point is None:
            return node
        return self._try(point, lambda: self._wrap_call(node, node, point, awaited=False)) or node

    def _try(self, point: Mapping[str, Any], place: Any) -> Optional[ast.AST]:
        if point["id"] in self.done:
            self.reasons[point["id"]] = "two places of the file have that position"
            return None
        try:
            return place()  # type: ignore[no-any-return]
        except _No as reason:
            self.reasons[point["id"]] = str(reason)
            return None

    def _wrap_call(self, node: ast.expr, call: Any, point: Mapping[str, Any], awaited: bool = True) -> ast.AST:
        key = self._check_scopes()
        if not isinstance(call, ast.Call):
            raise _No("what is awaited there is not a call")
        callee = ast.unparse(call.func)
        if callee in FRAME_SENSITIVE or callee.split("(")[0] in FRAME_SENSITIVE - {"super"}:
            raise _No(f"{callee} looks at the frame or the names around it")
        lazy = None if awaited else self.lazy.get(callee.rsplit(".", 1)[-1])
        if lazy and _is_plain(call.func):
            raise _No(f"the call only creates a {lazy}: nothing of its work happens there")
        names, roots = _call_roots(call, point, self._nearest())
        self._place_in(key, point, roots)
        return _end(node, point["id"], [_begin(node, point["id"]), node, _id(node, point["id"]), *names])

    def _wrap_body(self, node: Function, point: Mapping[str, Any]) -> ast.AST:
        key = self._check_scopes()
        if _calls_locals(node):
            raise _No("the function looks at its own names (locals, vars, eval, exec or dir)")
        names, roots = _body_roots(node, point)
        self._place_in(key, point, roots)
        _wrap_statements(node, point["id"], names, any(root[0] == "return" for root in roots))
        return node

    def _place_in(self, key: Tuple[str, int], point: Mapping[str, Any], roots: Roots) -> None:
        self.functions.setdefault(key, set()).add(point["id"])
        self.done[point["id"]] = roots

    def _nearest(self) -> Optional[Function]:
        for scope in reversed(self._scopes):
            if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return scope
        return None

    def _check_scopes(self) -> Tuple[str, int]:
        """The outermost function's (qualname, first line); raises where no probe may stand."""
        functions = [scope for scope in self._scopes if not isinstance(scope, ast.ClassDef)]
        if not functions:
            raise _No("it is not inside a function: module and class bodies run once, at import")
        outer = functions[0]
        if isinstance(outer, ast.Lambda):
            raise _No("it is inside a lambda, which has no name to find it by")
        for scope in self._scopes:
            _check_scope(scope, functions)
        index = self._scopes.index(outer)
        names = [scope.name for scope in self._scopes[: index + 1] if not isinstance(scope, ast.Lambda)]
        first = min([outer.lineno, *(decorator.lineno for decorator in outer.decorator_list)])
        return ".".join(names), first


def _check_scope(scope: Scope, functions: Sequence[Scope]) -> None:
    if isinstance(scope, ast.Lambda):
        return
    for decorator in scope.decorator_list:
        text = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        compiled = text.startswith(COMPILED) or text.rsplit(".", 1)[-1] in COMPILED_LAST
        if compiled and (not isinstance(scope, ast.ClassDef) or getattr(functions[0], "name", "") == "forward"):
            raise _No(f"{scope.name} belongs to a compiler (@{text}): a probe inside would break it")
    if isinstance(scope, ast.ClassDef):
        return
    if scope is functions[-1] and _is_generator(scope):
        raise _No(f"{scope.name} is a generator: its frames in flight keep their old code")
    if _never_returns(scope):
        raise _No(f"{scope.name} loops for ever: its frame keeps its old code, probe what it calls instead")


def _where(node: Any) -> Tuple[int, int, int, int]:
    return (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


def _is_plain(callee: ast.expr) -> bool:
    """Whether the callee is a name or an attribute of self or cls, so that a definition in this file is meant."""
    if isinstance(callee, ast.Attribute):
        return isinstance(callee.value, ast.Name) and callee.value.id in ("self", "cls")
    return isinstance(callee, ast.Name)


def lazy_functions(tree: ast.Module) -> Dict[str, str]:
    """Names of this file's functions whose call does no work, with what the call creates."""
    lazy: Dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.decorator_list and ast.unparse(node.decorator_list[-1]).rsplit(".", 1)[-1]
            if name in ("contextmanager", "asynccontextmanager"):
                continue
            if _is_generator(node):
                lazy[node.name] = "generator"
            elif isinstance(node, ast.AsyncFunctionDef):
                lazy[node.name] = "coroutine"
    return lazy


def _own_nodes(function: Function) -> List[ast.AST]:
    """The nodes of a function's body that run in its own frame (lambdas and nested definitions left out)."""
    nodes: List[ast.AST] = []
    stack: List[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        nodes.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))
    return nodes


def _is_generator(function: Function) -> bool:
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own_nodes(function))


def _never_returns(function: Function) -> bool:
    """Whether the function holds a ``while True`` that nothing leaves (return and break are looked for)."""
    for node in _own_nodes(function):
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            inner = ast.Module(body=node.body, type_ignores=[])
            if not any(isinstance(child, (ast.Return, ast.Break, ast.Raise)) for child in ast.walk(inner)):
                return True
    return False


def _calls_locals(function: Function) -> bool:
    names = {"locals", "vars", "eval", "exec", "dir"}
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        for node in _own_nodes(function)
    )


# -- what the value paths need --------------------------------------------------------------------------------------


def _wanted_roots(point: Mapping[str, Any]) -> List[str]:
    """The roots of the point's value paths in order of first use: ``return``, ``self``, ``argN`` or ``kw.NAME``."""
    roots: List[str] = []
    for path in (point.get("values") or {}).values():
        words = path.replace("[", ".").replace("|", ".").split(".")
        root = ".".join(words[:2]) if words[0] == "kw" else words[0]
        if root not in roots:
            roots.append(root)
    return roots


def _call_roots(call: ast.Call, point: Mapping[str, Any], function: Optional[Function]) -> Tuple[List[ast.expr], Roots]:
    """The names to hand to the probe, and for each root of the paths [root, index of the name, attributes...].

    Only plain names are handed over: reading an attribute here could raise in the server's own code.
    """
    names: List[ast.expr] = []
    roots: Roots = []
    for root in _wanted_roots(point):
        if root == "return":
            roots.append([root, -1])
            continue
        node, attributes = _argument(call, root, function), []  # type: Any, List[str]
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise _No(f"value root {root}: that argument is neither a name nor an attribute of a name")
        roots.append([root, len(names), *attributes])
        names.append(ast.copy_location(ast.Name(node.id, ast.Load()), call))
    return names, roots


def _argument(call: ast.Call, root: str, function: Optional[Function]) -> ast.expr:
    if root == "self":
        arguments = [*function.args.posonlyargs, *function.args.args] if function else []
        if not arguments:
            raise _No("value root self: the enclosing function has no parameters")
        return ast.Name(arguments[0].arg, ast.Load())
    if root.startswith("kw."):
        for keyword in call.keywords:
            if keyword.arg == root[3:]:
                return keyword.value
        raise _No(f"value root {root}: the call has no such keyword argument")
    index = _arg_index(root)
    if index >= len(call.args) or any(isinstance(arg, ast.Starred) for arg in call.args[: index + 1]):
        raise _No(f"value root {root}: the call has no such positional argument")
    return call.args[index]


def _body_roots(function: Function, point: Mapping[str, Any]) -> Tuple[List[ast.expr], Roots]:
    parameters = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    every = {*parameters, *(argument.arg for argument in function.args.kwonlyargs)}
    bound = {node.id for node in _own_nodes(function) if isinstance(node, ast.Name) and node.ctx.__class__ != ast.Load}
    names: List[ast.expr] = []
    roots: Roots = []
    for root in _wanted_roots(point):
        if root == "return":
            roots.append([root, -1])
            continue
        method = bool(parameters) and parameters[0] in ("self", "cls")
        index = 0 if root == "self" else -1 if root.startswith("kw.") else _arg_index(root) + method
        if index >= len(parameters) or (index < 0 and root[3:] not in every):
            raise _No(f"value root {root}: the function has no such parameter")
        name = parameters[index] if index >= 0 else root[3:]
        if name in bound:
            raise _No(f"value root {root}: the function binds or deletes {name} anew")
        roots.append([root, len(names)])
        names.append(ast.Name(name, ast.Load()))
    return names, roots


def _arg_index(root: str) -> int:
    if not root.startswith("arg") or not root[3:].isdigit():
        raise _No(f"unknown value root {root!r}")
    return int(root[3:])


# -- the new nodes --------------------------------------------------------------------------------------------------


def _begin(at: ast.AST, id: int) -> ast.expr:
    return ast.copy_location(ast.Call(ast.copy_location(ast.Constant(f"{BEGIN}{id}"), at), [], []), at)


def _id(at: ast.AST, id: int) -> ast.expr:
    return ast.copy_location(ast.Constant(id), at)


def _end(at: ast.AST, id: int, arguments: List[ast.expr]) -> ast.expr:
    return ast.copy_location(ast.Call(ast.copy_location(ast.Constant(f"{END}{id}"), at), arguments, []), at)


class _Returns(ast.NodeTransformer):
    """``return X`` becomes ``RESULT = X; return RESULT``, in the function's own frame."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is None:
            return node
        keep = ast.copy_location(ast.Assign([ast.Name(self.name, ast.Store())], node.value), node)
        return [keep, ast.copy_location(ast.Return(ast.Name(self.name, ast.Load())), node)]


def _wrap_statements(node: Function, id: int, names: List[ast.expr], needs_result: bool) -> None:
    """``token = begin(); try: BODY finally: end(token, result, names)``, below the docstring."""
    token, result = f".specmeter.t{id}", f".specmeter.r{id}"  # no source can spell these names
    body = node.body
    docstring = body[:1] if ast.get_docstring(node, clean=False) is not None else []
    body = body[len(docstring) :]
    at = node
    start: List[ast.stmt] = [ast.Assign([ast.Name(token, ast.Store())], _begin(at, id))]
    value: ast.expr = ast.Constant(None)
    if needs_result:
        start.insert(0, ast.Assign([ast.Name(result, ast.Store())], ast.Constant(None)))
        rewriter = _Returns(result)
        wrapped = [rewriter.visit(statement) for statement in body]
        body = [item for entry in wrapped for item in (entry if isinstance(entry, list) else [entry])]
        value = ast.Name(result, ast.Load())
    finish = ast.Expr(_end(at, id, [ast.Name(token, ast.Load()), value, _id(at, id), *names]))
    guarded = ast.Try(body=body or [ast.Pass()], handlers=[], orelse=[], finalbody=[finish])
    for statement in [*start, guarded, finish]:
        ast.copy_location(statement, at)
    node.body = [*docstring, *start, guarded]
