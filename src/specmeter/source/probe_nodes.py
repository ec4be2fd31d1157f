"""The syntax nodes that a probe consists of (``source.rewrite`` says what they look like).

Runs under the server's own interpreter (standard library of CPython 3.9).
"""

from __future__ import annotations

import ast
from typing import Any, List

from .refusals import Function

BEGIN = "\0specmeter.begin:"
END = "\0specmeter.end:"
WORD = "\0specmeter.word:"
THREAD = "\0specmeter.thread"
_THREAD = ".specmeter.i"  # no source can spell this name


def begin(at: ast.AST, id: int) -> ast.expr:
    """The call that gives a point's begin, at the position of ``at``."""
    return ast.copy_location(ast.Call(ast.copy_location(ast.Constant(f"{BEGIN}{id}"), at), [], []), at)


def number(at: ast.AST, id: int) -> ast.expr:
    """What stands for the point's number, at the position of ``at``."""
    return ast.copy_location(ast.Constant(f"{WORD}{id}"), at)


def end(at: ast.AST, id: int, token: ast.expr, result: ast.expr, names: List[ast.expr]) -> ast.Call:
    """The call of a point's end at the position of ``at``; its thread is not known (None) until ``know_thread``."""
    callee, thread = ast.copy_location(ast.Constant(f"{END}{id}"), at), ast.copy_location(ast.Constant(None), at)
    return ast.copy_location(ast.Call(callee, [token, result, number(at, id), thread, *names], []), at)


def know_thread(node: Function, ends: List[ast.Call]) -> None:
    """Ask for the thread once, where the function begins, and hand it to its ``ends``."""
    for call in ends:
        call.args[3] = ast.copy_location(ast.Name(_THREAD, ast.Load()), call)
    ask = ast.Call(ast.Constant(THREAD), [], [])
    first = 1 if ast.get_docstring(node, clean=False) is not None else 0
    node.body.insert(first, ast.copy_location(ast.Assign([ast.Name(_THREAD, ast.Store())], ask), node))


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


def wrap_statements(node: Function, id: int, names: List[ast.expr], needs_result: bool) -> ast.Call:
    """``token = begin(); try: BODY finally: end(token, result, names)``, below the docstring; gives the end's call."""
    token, result = f".specmeter.t{id}", f".specmeter.r{id}"  # no source can spell these names
    body = node.body
    docstring = body[:1] if ast.get_docstring(node, clean=False) is not None else []
    body = body[len(docstring) :]
    at = node
    start: List[ast.stmt] = [ast.Assign([ast.Name(token, ast.Store())], begin(at, id))]
    value: ast.expr = ast.Constant(None)
    if needs_result:
        start.insert(0, ast.Assign([ast.Name(result, ast.Store())], ast.Constant(None)))
        rewriter = _Returns(result)
        wrapped = [rewriter.visit(statement) for statement in body]
        body = [item for entry in wrapped for item in (entry if isinstance(entry, list) else [entry])]
        value = ast.Name(result, ast.Load())
    close = end(at, id, ast.Name(token, ast.Load()), value, names)
    finish = ast.Expr(close)
    guarded = ast.Try(body=body or [ast.Pass()], handlers=[], orelse=[], finalbody=[finish])
    for statement in [*start, guarded, finish]:
        ast.copy_location(statement, at)
    node.body = [*docstring, *start, guarded]
    return close
