"""What a source file holds: imports, classes with bases, functions with signature and decorators; a search."""

from __future__ import annotations

import ast
import os
import re
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

from .index import build, search
from .locate import Located, locate, package_folders
from .pyfile import PyFile, SourceError, read
from .tree import FunctionNode, calls, statements, unparse

Plain = Dict[str, Any]


def outline_target(request: Mapping[str, Any], entries: Sequence[str]) -> Plain:
    """The outline of ``target``, a dotted module or file, with ``lines`` (``[first, last]``) and ``grep`` if asked.

    Raises SourceError with the reason when the target cannot be found, read or parsed.
    """
    target = request["target"]
    located = _locate(target, entries)
    file = read(located.path)
    result = outline(file, located.module)
    result["zipped"] = located.zipped
    if request.get("lines"):
        first, last = request["lines"]
        listed = file.lines()
        result["text"] = [[number, listed[number - 1]] for number in range(max(1, first), min(last, len(listed)) + 1)]
    if request.get("grep"):
        result["matches"] = grep(file, request["grep"])
    return result


def package_target(request: Mapping[str, Any], entries: Sequence[str]) -> Plain:
    """The package ``target`` (dotted name or folder) as a whole: counts, files that cannot be read, and ``grep``.

    A file is parsed only if the index says that the pattern can be in it. Raises SourceError like ``outline_target``.
    """
    target = request["target"]
    root = target if os.path.isdir(target) else _package_folder(target, entries)
    index, count = build(root)
    unreadable = {path: entry[5] for path, entry in index.items() if entry[5]}
    result: Plain = {
        "path": os.path.realpath(root),
        "files": len(index),
        "read": count,
        "bytes": sum(entry[0] for entry in index.values()),
        "definitions": sum(len(entry[3].splitlines()) for entry in index.values()),
        "unreadable": unreadable,
    }
    if request.get("grep"):
        result["matches"] = matches = []
        for path in search(index, request["grep"]):
            try:
                found = grep(read(os.path.join(root, path)), request["grep"])
            except SourceError as error:
                unreadable[path] = error.reason
                continue
            matches += [{"file": path, **entry} for entry in found]
    return result


def _package_folder(target: str, entries: Sequence[str]) -> str:
    folders = package_folders(target, entries)
    if len(folders) > 1:
        raise SourceError(f"{target} is a namespace package in several folders: name one of {', '.join(folders)}")
    return folders[0]


def _locate(target: str, entries: Sequence[str]) -> Located:
    if os.path.sep in target or (target.endswith((".py", ".pyc", ".so")) and os.path.exists(target)):
        if not target.endswith(".py"):
            raise SourceError(f"{target} is not a Python source file")
        return Located("", os.path.abspath(target), os.path.basename(target) == "__init__.py")
    return locate(target, entries)


def outline(file: PyFile, module: str = "") -> Plain:
    """The outline of one file as plain data; lines count from 1."""
    tree = file.tree()
    functions: List[Plain] = []
    classes: List[Plain] = []
    _walk(tree, "", functions, classes)
    return {
        "module": module,
        "path": file.path,
        "size": len(file.data),
        "sha256": file.sha256,
        "encoding": file.encoding(),
        "newline": file.newline(),
        "line_count": len(file.lines()),
        "imports": imports(tree),
        "classes": classes,
        "functions": functions,
    }


def imports(tree: ast.Module) -> List[Plain]:
    """Imports at module level, those below ``if`` and ``try`` too: ``[{"line", "text"}]``."""
    found = [node for node in statements(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [{"line": node.lineno, "text": ast.unparse(node)} for node in sorted(found, key=lambda node: node.lineno)]


def _walk(parent: ast.AST, prefix: str, functions: List[Plain], classes: List[Plain]) -> None:
    for node in sorted(statements(parent), key=lambda node: node.lineno):
        if isinstance(node, ast.ClassDef):
            classes.append(
                {
                    "qualname": prefix + node.name,
                    "line": node.lineno,
                    "end_line": node.end_lineno,
                    "bases": [ast.unparse(base) for base in node.bases],
                    "decorators": [unparse(item) for item in node.decorator_list],
                }
            )
            _walk(node, f"{prefix}{node.name}.", functions, classes)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(_function(node, prefix))
            _walk(node, f"{prefix}{node.name}.<locals>.", functions, classes)


def _function(node: FunctionNode, prefix: str) -> Plain:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return {
        "qualname": prefix + node.name,
        "line": node.lineno,
        "end_line": node.end_lineno,
        "signature": f"({ast.unparse(node.args)}){returns}",
        "is_async": isinstance(node, ast.AsyncFunctionDef),
        "decorators": [unparse(item) for item in node.decorator_list],
    }


def grep(file: PyFile, pattern: str) -> List[Plain]:
    """Names and calls that ``pattern`` (a regular expression) is found in: ``[{"kind", "line", "qualname", "text"}]``.

    Searched are qualified names of classes and functions, imported names, and the unparsed callees of calls with the
    function they stand in. Text in comments and strings is not. Raises SourceError when the pattern is not valid.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise SourceError(f"{pattern!r} is not a regular expression: {error}") from None
    found = [entry for entry in _searchable(file.tree()) if wanted.search(entry[3])]
    found.sort(key=lambda entry: entry[1])
    return [{"kind": kind, "line": line, "qualname": name, "text": text} for kind, line, name, text in found]


def _searchable(tree: ast.Module) -> Iterator[Tuple[str, int, str, str]]:
    for item in imports(tree):
        yield "import", item["line"], "", item["text"]
    pending: List[Tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        parent, prefix = pending.pop()
        for call in calls(parent):
            yield "call", call.node.lineno, prefix.rstrip(".").replace(".<locals>", ""), call.callee
        for node in statements(parent):
            if isinstance(node, ast.ClassDef):
                yield "class", node.lineno, prefix + node.name, prefix + node.name
                pending.append((node, f"{prefix}{node.name}."))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield "function", node.lineno, prefix + node.name, prefix + node.name
                pending.append((node, f"{prefix}{node.name}.<locals>."))
