"""What may carry no probe, told from the syntax tree: each reason as a sentence, or a raised ``NotPlaced``.

Runs under the server's own interpreter (standard library of CPython 3.9).
"""

from __future__ import annotations

import ast
from typing import Dict, List, Sequence, Union

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
Scope = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda]

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


_OWN_NAMES = frozenset(
    f"{space}{name}" for space in ("", "builtins.") for name in ("locals", "vars", "eval", "exec", "dir")
)
_OWN_NAMES |= {"sys._getframe", "_getframe", "inspect.currentframe", "currentframe", "inspect.stack"}


class NotPlaced(Exception):
    """The reason why one point cannot be placed."""


def check_scope(scope: Scope, functions: Sequence[Scope]) -> None:
    """Raise NotPlaced where ``scope``, one of those around a place, forbids a probe there.

    ``functions`` are those of the scopes that are functions or lambdas, outermost first.
    """
    if isinstance(scope, ast.Lambda):
        return
    for decorator in scope.decorator_list:
        text = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        compiled = text.startswith(COMPILED) or text.rsplit(".", 1)[-1] in COMPILED_LAST
        if compiled and (not isinstance(scope, ast.ClassDef) or getattr(functions[0], "name", "") == "forward"):
            raise NotPlaced(f"{scope.name} belongs to a compiler (@{text}): a probe inside would break it")
    if isinstance(scope, ast.ClassDef):
        return
    if scope is functions[-1] and _is_generator(scope):
        raise NotPlaced(f"{scope.name} is a generator: its frames in flight keep their old code")
    if _never_returns(scope):
        raise NotPlaced(f"{scope.name} loops for ever: its frame keeps its old code, probe what it calls instead")


def is_plain(callee: ast.expr) -> bool:
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


def own_nodes(function: Function) -> List[ast.AST]:
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
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own_nodes(function))


def _never_returns(function: Function) -> bool:
    """Whether the function holds a ``while True`` that nothing leaves (return and break are looked for)."""
    for node in own_nodes(function):
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            inner = ast.Module(body=node.body, type_ignores=[])
            if not any(isinstance(child, (ast.Return, ast.Break, ast.Raise)) for child in ast.walk(inner)):
                return True
    return False


def calls_locals(function: Function) -> bool:
    """Whether the function looks at its own names, among which a probed one has more than the source.

    Where it asks for its frame, its names may be meant. Decorators and defaults of inner functions run in it too.
    """
    nodes = own_nodes(function)
    for inner in [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]:
        outside = list(inner.decorator_list)
        if not isinstance(inner, ast.ClassDef):
            outside += [default for default in [*inner.args.defaults, *inner.args.kw_defaults] if default is not None]
        nodes += [node for expression in outside for node in ast.walk(expression)]
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "f_locals")
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in _OWN_NAMES)
        for node in nodes
    )
