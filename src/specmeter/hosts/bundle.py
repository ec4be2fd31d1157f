"""What is sent to the far side: the parts of specmeter that the command needs, as one archive; nothing is installed."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import specmeter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Commands whose parts run on a bare CPython 3.9 or later.
COMMANDS = ("source", "plan", "recipe", "run", "arm", "disarm", "status", "attach", "detach", "patch", "check")
_FOLDERS = ("source", "recipes", "runtime", "control")
_FILES = (
    "__init__.py",
    "errors.py",
    "kept_runs.py",
    "cli.py",
    "hosts/__init__.py",
    "hosts/dispatch.py",
    "commands/__init__.py",
    "commands/device_options.py",
    "commands/link_options.py",
    "reporters/__init__.py",
    "reporters/inert.py",
    "reporters/lines.py",
)
# What one command needs beyond that.
_MORE_FOLDERS = {
    "check": ("wiring", "checkpoint"),
    **dict.fromkeys(("attach", "detach", "arm", "disarm", "status", "run"), ("attach", "patch")),
    "patch": ("patch",),
}
_MORE_FILES = {"check": ("reporters/check_words.py",)}
# What a session needs there: the server's guardian, the load generator, the reader of rings.
RELAY = "relay"
_RELAY_FOLDERS = ("source", "recipes", "runtime", "control")
_RELAY_FILES = (
    "__init__.py",
    "errors.py",
    "hosts/__init__.py",
    "hosts/far_load.py",
    "hosts/far_relay.py",
    "hosts/far_rings.py",
    "hosts/far_server.py",
    "hosts/frames.py",
    "bench/__init__.py",
    "bench/machine.py",
    "engines/guardian.py",
    "engines/flags.py",
    "trace/masking.py",
    "tune/flags.py",
)
# Packages of which one module goes along, without what the package itself imports.
_BARE = ("engines", "trace", "tune")


def bundle(command: str) -> bytes:
    """The archive for one of ``COMMANDS``, about 120 kB, or for ``RELAY``."""
    root = Path(specmeter.__file__).parent
    relay = command == RELAY
    names = [*_FILES, *(f"commands/{name}.py" for name in {command, "source", "status"})]
    if relay:
        names = list(_RELAY_FILES)
    names += _MORE_FILES.get(command, ())
    for folder in _RELAY_FOLDERS if relay else (*_FOLDERS, *_MORE_FOLDERS.get(command, ())):
        files = sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.toml")])
        names += [path.relative_to(root).as_posix() for path in files]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in dict.fromkeys(names):
            archive.write(root / name, f"specmeter/{name}")
        for name in _BARE if relay else ():
            archive.writestr(f"specmeter/{name}/__init__.py", "")
        # The recipes' format is in the standard library from 3.11 on only.
        toml = Path(str(tomllib.__file__)).parent
        for path in sorted(toml.glob("*.py")):
            archive.write(path, f"tomli/{path.name}")
    return stream.getvalue()
