"""Run inside the process that is attached to (standard library of CPython 3.9): starts the runtime for LINK.

``LINK``, ``FOLDER`` (the runtime's sources) and ``ANSWER`` (a file) are filled in. Never raises.
"""

import os
import sys

LINK = FOLDER = ANSWER = ""


def _start(package: str) -> str:
    """Start the runtime; why it did not start, or an empty string."""
    if package not in sys.modules:
        from importlib.machinery import ModuleSpec, SourceFileLoader

        path = os.path.join(FOLDER, "__init__.py")
        spec = ModuleSpec(package, SourceFileLoader(package, path), origin=path, is_package=True)
        spec.submodule_search_locations = [FOLDER]
        module = type(sys)(package)
        module.__spec__, module.__path__, module.__file__ = spec, [FOLDER], path
        sys.modules[package] = module
    # What is loaded later comes from the link that is attached now; an earlier one may be gone.
    sys.modules[package].__path__ = [FOLDER]
    __import__(package + ".boot")
    boot = sys.modules[package + ".boot"]
    running = boot.current()
    if running is not None and not running.detached and running.link != LINK:
        return "it carries the runtime of another link: " + str(running.link)
    return "" if boot.activate(LINK) else "the runtime did not start: see the server's standard error"


def _answer(why: str) -> None:
    handle = os.open(ANSWER + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(handle, why.encode("utf-8", "backslashreplace"))
    os.close(handle)
    os.rename(ANSWER + ".new", ANSWER)


try:
    _answer(_start("_specmeter_runtime"))
except Exception as error:
    try:
        _answer(type(error).__name__ + ": " + str(error))
    except Exception:
        pass
