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
COMMANDS = ("source", "plan", "recipe", "run", "arm", "disarm", "status", "attach", "detach", "patch")
_FOLDERS = ("source", "recipes", "runtime", "control", "attach", "patch")
_FILES = (
    "__init__.py",
    "errors.py",
    "cli.py",
    "hosts/__init__.py",
    "hosts/dispatch.py",
    "commands/__init__.py",
    "commands/link_options.py",
)


def bundle(command: str) -> bytes:
    """The archive for one of ``COMMANDS``, about 120 kB."""
    root = Path(specmeter.__file__).parent
    names = [*_FILES, *(f"commands/{name}.py" for name in {command, "source", "status"})]
    for folder in _FOLDERS:
        files = sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.toml")])
        names += [path.relative_to(root).as_posix() for path in files]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in dict.fromkeys(names):
            archive.write(root / name, f"specmeter/{name}")
        # The recipes' format is in the standard library from 3.11 on only.
        toml = Path(str(tomllib.__file__)).parent
        for path in sorted(toml.glob("*.py")):
            archive.write(path, f"tomli/{path.name}")
    return stream.getvalue()
