"""Run by the lines of a patch, in the server: starts the runtime that lies beside this file, for the link it names.

Never raises: without a link, without the folder, under another user, the server simply goes on.
"""

import os
import sys


def _start(here: str) -> None:
    package = "_specmeter_runtime"
    with open(os.path.join(here, "link"), encoding="utf-8", errors="surrogateescape") as file:
        link = file.read()
    if not os.path.isdir(link):
        return  # the controller took it away, or the machine was started anew: dormant
    if package not in sys.modules:
        from importlib.machinery import ModuleSpec, SourceFileLoader

        folder = os.path.join(here, "runtime")
        path = os.path.join(folder, "__init__.py")
        spec = ModuleSpec(package, SourceFileLoader(package, path), origin=path, is_package=True)
        spec.submodule_search_locations = [folder]
        module = type(sys)(package)
        module.__spec__, module.__path__, module.__file__ = spec, [folder], path
        sys.modules[package] = module
    __import__(package + ".boot")
    # A launch with the runtime came first, if there was one: one runtime a process.
    sys.modules[package + ".boot"].activate(os.environ.get("SPECMETER_LINK") or link)


try:
    _start(os.path.dirname(os.path.abspath(__file__)))
except Exception as error:
    try:
        sys.stderr.write("specmeter: the runtime did not start: %s: %s\n" % (type(error).__name__, error))
    except Exception:
        pass
