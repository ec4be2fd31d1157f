"""Tells when a module of the plan has been imported. Leaves bytecode caching and the loader as they were."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Callable, Collection, Optional, Sequence

Imported = Callable[[ModuleType, Any], None]


class ImportHook:
    """The first finder of ``sys.meta_path``: lets the others find, and calls ``imported(module, spec)`` afterwards."""

    def __init__(self, names: Collection[str], imported: Imported, failed: Callable[[str, str], None]) -> None:
        self._names = frozenset(names)
        self._imported = imported
        self._failed = failed

    def install(self) -> None:
        """Put the hook in place, and take the modules that were imported before it."""
        sys.meta_path.insert(0, self)
        for name in sorted(self._names):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if module is not None and spec is not None and not getattr(spec, "_initializing", False):
                self._imported(module, spec)

    def remove(self) -> None:
        """Take the hook out."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Optional[Sequence[str]] = None, target: Any = None) -> Any:
        """The spec that the other finders give; its loader calls us once after it has executed the module."""
        if name not in self._names:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find is not None else None
            if spec is not None:
                try:
                    self._watch(spec)
                except Exception:
                    pass  # imported as without us
                return spec
        return None

    def _watch(self, spec: Any) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None or "exec_module" in getattr(loader, "__dict__", {}):
            return self._failed(spec.name, "its loader cannot be watched")

        def exec_module(module: ModuleType) -> None:
            try:
                del loader.exec_module  # the loader is left as it was
            except Exception:
                pass
            execute(module)
            try:
                self._imported(module, spec)
            except Exception:
                pass  # the module is there, and stays as it is

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return self._failed(spec.name, f"its loader ({type(loader).__name__}) cannot be watched")
        return None
