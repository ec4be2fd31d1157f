"""Runs at the start of every Python below a launch: starts the runtime, then the next sitecustomize."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "_specmeter_runtime"


def _start() -> None:
    if not os.environ.get("SPECMETER_LINK"):
        return
    if _PACKAGE not in sys.modules:
        from importlib.machinery import ModuleSpec, SourceFileLoader

        folder = os.path.dirname(_HERE)
        path = os.path.join(folder, "__init__.py")
        spec = ModuleSpec(_PACKAGE, SourceFileLoader(_PACKAGE, path), origin=path, is_package=True)
        spec.submodule_search_locations = [folder]
        module = type(sys)(_PACKAGE)
        module.__spec__, module.__path__, module.__file__ = spec, [folder], path
        sys.modules[_PACKAGE] = module
    __import__(f"{_PACKAGE}.boot")
    sys.modules[f"{_PACKAGE}.boot"].activate()


def _chain() -> None:
    """Only the first sitecustomize on the path runs by itself, so the next one is run from here, in our place."""
    from importlib.machinery import PathFinder

    done = sys.__dict__.setdefault("_specmeter_chained", set())
    done.add(_HERE)
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") not in done]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None or spec.origin is None:
        return
    done.add(os.path.dirname(os.path.abspath(spec.origin)))
    module = type(sys)("sitecustomize")
    module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _start()
except Exception as error:
    sys.stderr.write(f"specmeter: the runtime did not start: {type(error).__name__}: {error}\n")
_chain()
