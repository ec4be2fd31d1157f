"""An engine's source folder, read with ``ast``: classes by name, their bases, methods, and what their attributes are.

Only the classes asked for are parsed: an engine's model file has thousands of lines, and a check must be quick.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from specmeter.errors import SpecmeterError
from specmeter.wiring.evaluate_values import Instance

MAX_SOURCE_BYTES = 4_000_000
_CLASS = re.compile(r"^class (\w+)\b", re.MULTILINE)
_GET_LANGUAGE_MODEL = cast(
    ast.FunctionDef, ast.parse("def get_language_model(self): return self.language_model").body[0]
)
_TOP_LEVEL = re.compile(r"^[^\s#)\]}]", re.MULTILINE)


@dataclass
class Module:
    """One source file: its text and where its top-level classes start (character offset of ``class NAME``)."""

    path: Path
    text: str
    starts: dict[str, int]
    imports: dict[str, str] | None = None
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)

    def class_node(self, name: str) -> ast.ClassDef | None:
        """The syntax tree of a top-level class with the file's own line numbers, or None."""
        if name not in self.classes and name in self.starts:
            start = self.starts[name]
            end = next((m.start() for m in _TOP_LEVEL.finditer(self.text, start + 1) if m.start() > start + 5), None)
            self.classes[name] = self._cut(name, start, end)
        return self.classes.get(name)

    def _cut(self, name: str, start: int, end: int | None) -> ast.ClassDef:
        line = self.text.count("\n", 0, start)
        try:
            cut = ast.parse(self.text[start:end]).body[0]
            if isinstance(cut, ast.ClassDef):
                return ast.increment_lineno(cut, line)
        except (SyntaxError, ValueError, RecursionError, IndexError):
            # A string that has text in the first column ends the cut too early: the whole file is the answer then.
            pass
        whole = parse(self.path, self.text)
        return next(node for node in whole.body if isinstance(node, ast.ClassDef) and node.name == name)

    def imported(self) -> dict[str, str]:
        """Names that the file imports with ``from MODULE import NAME``: name -> "MODULE:ORIGINAL"."""
        if self.imports is None:
            self.imports = {}
            head = re.compile(r"^from\s+([.\w]+)\s+import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)
            for module, names in head.findall(self.text):
                for part in re.sub(r"#[^\n]*", "", names).strip("()").split(","):
                    words = part.split()
                    if words:
                        self.imports[words[-1]] = f"{module}:{words[0]}"
        return self.imports


@dataclass(frozen=True)
class Located:
    """A class and the module it stands in."""

    module: Module
    node: ast.ClassDef


class Tree:
    """The source of one engine; ``package`` is the folder that is imported as its name (``.../sglang``)."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._modules: dict[Path, Module | None] = {}

    def module(self, relative: str) -> Module | None:
        """The module at a path below the package, or None when there is no such file."""
        return self._load(self.package / relative)

    def find(self, folder: str, pattern: str) -> list[Path]:
        """Files below ``folder`` that match ``pattern``, sorted."""
        root = self.package / folder
        return sorted(root.glob(pattern)) if root.is_dir() else []

    def _load(self, path: Path) -> Module | None:
        if path not in self._modules:
            self._modules[path] = None
            if path.is_file() and path.stat().st_size <= MAX_SOURCE_BYTES:
                # utf-8-sig: some released files start with a byte order mark.
                text = path.read_text("utf-8-sig", "replace")
                self._modules[path] = Module(path, text, {m.group(1): m.start() for m in _CLASS.finditer(text)})
        return self._modules[path]

    def class_in(self, folder: str, name: str) -> Located | None:
        """The class of that name in any file directly below ``folder``."""
        needle = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
        for path in self.find(folder, "*.py"):
            module = self._load(path)
            if module is not None and name in module.starts and needle.search(module.text):
                node = module.class_node(name)
                if node is not None:
                    return Located(module, node)
        return None

    def class_at(self, module: str, name: str) -> Located | None:
        """The class of that name in a module given as a dotted path below or with the package's name."""
        parts = module.removeprefix(self.package.name + ".").split(".")
        path = self.package.joinpath(*parts)
        found = self._load(path.with_suffix(".py")) or self._load(path / "__init__.py")
        return self.resolve(found, name) if found is not None else None

    def resolve(self, module: Module, name: str) -> Located | None:
        """The class that ``name`` means in ``module``: its own or an imported one of the same package."""
        node = module.class_node(name)
        if node is not None:
            return Located(module, node)
        origin = module.imported().get(name)
        if origin is None:
            return None
        where, original = origin.split(":")
        other = self._imported_module(module, where)
        return self.resolve(other, original) if other is not None and other is not module else None

    def _imported_module(self, module: Module, where: str) -> Module | None:
        if where.startswith("."):
            base = module.path.parent
            for _ in range(len(where) - len(where.lstrip(".")) - 1):
                base = base.parent
            path = base.joinpath(*where.lstrip(".").split("."))
        else:
            parts = where.split(".")
            if parts[0] != self.package.name:
                return None
            path = self.package.joinpath(*parts[1:])
        return self._load(path.with_suffix(".py")) or self._load(path / "__init__.py")

    def lineage(self, located: Located) -> list[Located]:
        """The class followed by its bases in the tree, in the order in which methods are looked up."""
        order: list[Located] = []
        waiting = [located]
        while waiting and len(order) < 50:
            current = waiting.pop(0)
            if any(current.node is known.node for known in order):
                continue
            order.append(current)
            bases = [self.resolve(current.module, ast.unparse(base).split("[")[0]) for base in current.node.bases]
            waiting = [base for base in bases if base is not None] + waiting
        return order


class SourceClass:
    """A class of the tree as the evaluator sees it; ``configs`` are the values of ``self.config`` and the like."""

    def __init__(self, tree: Tree, located: Located, fields: Mapping[str, object], text_architecture: str) -> None:
        self.tree = tree
        self.located = located
        self.lineage = tree.lineage(located)
        self._fields = fields
        self._text_architecture = text_architecture

    def method(self, name: str, above: ast.FunctionDef | None = None) -> ast.FunctionDef | None:
        """See evaluate_values.ClassView."""
        if name == "get_language_model" and self.attribute_class("language_model") is not None:
            # The engine's own version searches the modules of the built model, which only exists when it runs.
            return _GET_LANGUAGE_MODEL
        seen = above is None
        for located in self.lineage:
            for node in located.node.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    if seen:
                        return node
                    seen = node is above
        return None

    def module_of(self, function: ast.FunctionDef) -> Module:
        """The module that holds a method found by this class."""
        return next((part.module for part in self.lineage if function in part.node.body), self.located.module)

    def attribute(self, name: str) -> object:
        """See evaluate_values.ClassView: known fields, else an instance of the class that __init__ assigns."""
        if name in self._fields:
            return self._fields[name]
        view = self.attribute_class(name)
        return None if view is None else Instance(view=view)

    def attribute_class(self, name: str) -> SourceClass | None:
        """The class of ``self.name`` as __init__ makes it, or None."""
        for located in self.lineage:
            for function in located.node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    for node in ast.walk(function):
                        found = self._made_by(located.module, node, name)
                        if found is not None:
                            return SourceClass(self.tree, found, self._fields, self._text_architecture)
        return None

    def _made_by(self, module: Module, node: ast.AST, name: str) -> Located | None:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            return None
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not any(ast.unparse(target) == f"self.{name}" for target in targets):
            return None
        for call in (part for part in ast.walk(node.value) if isinstance(part, ast.Call)):
            callee = self._class_constant(ast.unparse(call.func))
            if callee.startswith("self._init") or callee == "init_vllm_registered_model":
                return self._factory(callee)
            found = self.tree.resolve(module, callee) if callee.isidentifier() else None
            if found is not None:
                return found
        return None

    def _class_constant(self, callee: str) -> str:
        """The class name behind ``self.model_cls`` and the like: a constant of the class body."""
        name = callee.removeprefix("self.")
        if name == callee:
            return callee
        for located in self.lineage:
            for node in located.node.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                    return ast.unparse(node.value)
        return callee

    def _factory(self, callee: str) -> Located | None:
        if callee == "init_vllm_registered_model":
            return self.tree.class_in("model_executor/models", self._text_architecture)
        function = self.method(callee.removeprefix("self."))
        if function is None:
            return None
        owner = next((part for part in self.lineage if function in part.node.body), self.located)
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).isidentifier():
                found = self.tree.resolve(owner.module, ast.unparse(node.func))
                if found is not None:
                    return found
        return None


def parse(path: Path, text: str) -> ast.Module:
    """Parse source text; a file that this Python cannot read is an error that names it."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as fault:
        raise SpecmeterError(
            f"cannot parse {path}",
            why=str(fault),
            next_step="Run specmeter with a Python at least as new as the engine's.",
        ) from None
