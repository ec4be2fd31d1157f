"""Small recipes as text, and made-up engines to plan them for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def recipe(*tables: str, engine: str = "toy", dist: str = "pytest", range: str = ">=1") -> str:
    """A recipe of these tables for the versions ``range`` of the distribution ``dist``."""
    head = f'schema = 1\nengine = "{engine}"\n\n[[versions]]\ndist = ["{dist}"]\nrange = "{range}"\n'
    return "\n".join([head, *tables])


def runner(name: str) -> str:
    """A runner's table."""
    return f'[[runner]]\nname = "{name}"\n'


def point(
    name: str,
    module: str,
    function: str,
    *,
    role: str = "leaf",
    clock: str = "host",
    required: bool = True,
    runner: str | None = None,
    values: Mapping[str, str] | None = None,
    call: str | None = None,
    inside: str | None = None,
    sites: int | None = None,
) -> str:
    """A point's table with one anchor: a call that matches ``call`` in ``function``, or its whole body without one."""
    anchor = {"module": module, "function": function, "call": call, "inside": inside, "sites": sites}
    given = ", ".join(f"{key} = {_value(value)}" for key, value in anchor.items() if value is not None)
    fields = {
        "name": name,
        "role": role,
        "kind": "body" if call is None else "call",
        "clock": clock,
        "required": required,
        "runner": runner,
    }
    lines = ["[[point]]", *(f"{key} = {_value(value)}" for key, value in fields.items() if value is not None)]
    lines.append(f"anchors = [{{ {given} }}]")
    if values:
        lines += ["[point.values]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def cycle(module: str, function: str, **how: Mapping[str, str] | bool) -> str:
    """The cycle point: a whole function."""
    return point("cycle", module, function, role="cycle", **how)  # type: ignore[arg-type]


def install(folder: Path, package: str, modules: Mapping[str, str], version: str = "1.5", init: str = "") -> Path:
    """A made-up distribution: the package's modules by name, and metadata that tells its version. Gives ``folder``."""
    (folder / package).mkdir(parents=True)
    for name, text in {"__init__": init, **modules}.items():
        (folder / package / f"{name}.py").write_text(text)
    metadata = folder / f"{package}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Version: {version}\n")
    return folder


def _value(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    # Literal strings keep the backslashes of a regular expression and the quotes of a path.
    return f"'{value}'" if "\\" in value or '"' in value else f'"{value}"'
