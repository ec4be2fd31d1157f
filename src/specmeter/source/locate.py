"""Which file an environment would import for a module, found without importing anything.

The search walks ``sys.path`` of the running interpreter with the import system's own ``FileFinder`` and then each
package's search path by hand, so no ``__init__`` runs. A package whose ``__init__`` changes ``__path__`` is searched by
what lies on disk.
"""

from __future__ import annotations

import ast
import difflib
import glob
import os
import sys
import zipfile
from dataclasses import dataclass
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from .pyfile import SourceError

_LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


@dataclass(frozen=True)
class Located:
    """A module's source file. ``zipped`` says that ``path`` leads into an archive."""

    module: str
    path: str
    is_package: bool
    zipped: bool = False


@dataclass(frozen=True)
class _Found:
    path: Optional[str]
    search: Tuple[str, ...]
    problem: str = ""
    zipped: bool = False


def locate(module: str, entries: Sequence[str]) -> Located:
    """The source file that a server with the search path ``entries`` would import as ``module``.

    Raises SourceError saying how far the search got and which names come near: module missing, built in, compiled, a
    bare namespace package, or ``.pyc`` only.
    """
    found = _resolve(module, entries)
    if found.problem or found.path is None:
        raise SourceError(f"{module}: {found.problem}", reached=module)
    return Located(module, found.path, bool(found.search), found.zipped)


def package_folders(package: str, entries: Sequence[str]) -> Tuple[str, ...]:
    """The folders that a package, a namespace package too, is searched in. Raises SourceError when it is no package."""
    found = _resolve(package, entries)
    if not found.search:
        raise SourceError(f"{package} is a module, not a package", reached=package)
    return found.search


def _resolve(module: str, entries: Sequence[str]) -> _Found:
    if not module or any(not part.isidentifier() for part in module.split(".")):
        raise SourceError(f"{module!r} is not a dotted module name")
    if module in sys.builtin_module_names:
        raise SourceError(f"{module} is built into the interpreter: there is no source file")
    parts = module.split(".")
    found = _find(parts[0], entries) or _find_editable(parts[0], entries)
    if found is None:
        raise _missing(module, parts[0], entries, 0)
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        if not found.search:
            raise SourceError(f"{name} is a module, not a package, so {module} cannot be in it", reached=name)
        inner = _find(parts[depth], found.search)
        if inner is None:
            raise _missing(module, f"{name}.{parts[depth]}", found.search, depth)
        found = inner
    return found


def submodules(search: Iterable[str]) -> List[str]:
    """Names of the modules and packages directly below the folders of ``search``."""
    names = set()
    for place in search:
        try:
            listed = os.listdir(place or ".")
        except OSError:
            continue
        for name in listed:
            stem, suffix = os.path.splitext(name)
            if stem.isidentifier() and (suffix == ".py" or (not suffix and os.path.isdir(os.path.join(place, name)))):
                names.add(stem)
    return sorted(names)


def _missing(module: str, name: str, search: Sequence[str], depth: int) -> SourceError:
    parent = name.rpartition(".")[0]
    near = difflib.get_close_matches(name.rpartition(".")[2], submodules(search), 3, 0.5)
    where = f"in {parent}" if parent else "on this environment's search path"
    reason = f"module {module} is not in this environment: no {name.rpartition('.')[2]} {where}"
    if depth == 0 and _other_finders():
        reason += f" (import finders of its own are active there: {', '.join(_other_finders())})"
    return SourceError(reason, reached=parent, nearest=tuple(f"{parent}.{item}".lstrip(".") for item in near))


def _other_finders() -> List[str]:
    standard = {"BuiltinImporter", "FrozenImporter", "PathFinder"}
    names = {getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path}
    return sorted(names - standard - {"DistutilsMetaFinder", "_EditableFinder"})


def _find(name: str, search: Sequence[str]) -> Optional[_Found]:
    portions: List[str] = []
    for entry in search:
        place = entry or os.getcwd()
        if os.path.isdir(place):
            spec = FileFinder(place, *_LOADERS).find_spec(name)
            if spec is None:
                continue
            if spec.loader is None:
                portions.extend(spec.submodule_search_locations or [])
                continue
            return _judge(spec.origin or "", tuple(spec.submodule_search_locations or ()))
        inside = _find_zipped(name, place)
        if inside is not None:
            return inside
    if portions:
        return _Found(None, tuple(portions), "a namespace package: it has no file of its own")
    return None


def _judge(origin: str, search: Tuple[str, ...]) -> _Found:
    if origin.endswith(tuple(SOURCE_SUFFIXES)):
        return _Found(os.path.abspath(origin), search)
    if origin.endswith(tuple(BYTECODE_SUFFIXES)):
        return _Found(None, search, f"only byte code is there ({origin}): without source nothing can be read or probed")
    return _Found(None, search, f"a compiled extension ({origin}): it has no Python source")


def _find_zipped(name: str, entry: str) -> Optional[_Found]:
    archive, inner = entry, ""
    while archive and not os.path.isfile(archive):
        archive, part = os.path.split(archive)
        if not part:
            return None
        inner = part + "/" + inner
    try:
        with zipfile.ZipFile(archive) as opened:
            members = set(opened.namelist())
    except (OSError, zipfile.BadZipFile):
        return None
    for tail, search in ((f"{name}/__init__", (f"{entry}/{name}",)), (name, ())):
        if f"{inner}{tail}.py" in members:
            return _Found(f"{archive}/{inner}{tail}.py", search, zipped=True)
        if f"{inner}{tail}.pyc" in members:
            return _Found(None, search, f"only byte code is in {archive}: without source nothing can be read or probed")
    return None


def _find_editable(name: str, entries: Sequence[str]) -> Optional[_Found]:
    """An editable install by setuptools' finder: the mapping in its file is read as a literal, the file is not run."""
    for entry in entries:
        for finder in sorted(glob.glob(os.path.join(glob.escape(entry or "."), "__editable__*finder.py"))):
            target = _mapping(finder).get(name)
            if target is None:
                continue
            if os.path.isdir(target):
                init = os.path.join(target, "__init__.py")
                problem = "" if os.path.isfile(init) else "a namespace package: it has no file of its own"
                return _Found(None if problem else init, (target,), problem)
            for path in (target, target + ".py"):
                if os.path.isfile(path):
                    return _Found(path, ())
    return None


def _mapping(finder: str) -> Dict[str, str]:
    try:
        with open(finder, "rb") as handle:
            tree = ast.parse(handle.read(), finder)
    except (OSError, SyntaxError, ValueError):
        return {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "MAPPING" for target in targets):
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            try:
                read = ast.literal_eval(value) if value is not None else {}
            except ValueError:
                return {}
            return read if isinstance(read, dict) else {}
    return {}
