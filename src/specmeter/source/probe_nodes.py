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


def begin(at: ast.AST, id: int) -> ast.expr:
    """The call that gives a point's begin, at the position of ``at``."""
    return ast.copy_location(ast.Call(ast.copy_location(ast.Constant(f"{BEGIN}{id}"), at), [], []), at)


def number(at: ast.AST, id: int) -> ast.expr:
    """What stands for the point's number, at the position of ``at``."""
    return ast.copy_location(ast.Constant(f"{WORD}{id}"), at)


def end(at: ast.AST, id: int, arguments: List[ast.expr]) -> ast.expr:
    """The call of a point's end with ``arguments`` (begin, result, number, names), at the position of ``at``."""
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


def wrap_statements(node: Function, id: int, names: List[ast.expr], needs_result: bool) -> None:
    """``token = begin(); try: BODY finally: end(token, result, names)``, below the docstring."""
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
    finish = ast.Expr(end(at, id, [ast.Name(token, ast.Load()), value, number(at, id), *names]))
    guarded = ast.Try(body=body or [ast.Pass()], handlers=[], orelse=[], finalbody=[finish])
    for statement in [*start, guarded, finish]:
        ast.copy_location(statement, at)
    node.body = [*docstring, *start, guarded]
