"""Reads recipes: the built-in ones of each engine and a user's own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.schema import problems

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BUILT_IN = Path(__file__).parent
# What else a user may call the engine that ships with specmeter.
_ALIASES = {"embedded": "specmeter"}


@dataclass(frozen=True)
class Recipe:
    """A valid recipe: its engine, its tables as TOML gave them, and the hash of its bytes."""

    engine: str
    path: Path
    sha256: str
    data: dict[str, Any]


def built_in_engines() -> list[str]:
    """Names of the engines that specmeter has a recipe for."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.toml"))


def built_in(engine: str) -> Recipe:
    """The recipe that specmeter ships for ``engine``. Raises SpecmeterError naming those there are."""
    path = _BUILT_IN / f"{canonical(engine)}.toml"
    if not path.is_file():
        raise SpecmeterError(
            f"specmeter has no recipe for an engine named {engine!r}.",
            why=f"It has: {', '.join(built_in_engines())}.",
            next_step="Name one of these, or give a recipe of your own with --recipe (docs/recipes.md).",
        )
    return load(path)


def canonical(engine: str) -> str:
    """The engine's name as its recipe writes it."""
    return _ALIASES.get(engine, engine)


class Unreadable(SpecmeterError):
    """A recipe's file that cannot be read, so that nothing can be said of the recipe."""


def load(path: Path) -> Recipe:
    """Read and check one recipe file.

    Raises Unreadable, or SpecmeterError that lists everything wrong, with line numbers.
    """
    try:
        raw = path.read_bytes()
        data = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise Unreadable(
            f"The recipe {path} cannot be read.",
            error.strerror or str(error),
            "Name a recipe's file; `specmeter recipe show ENGINE` prints one to start from.",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecmeterError(f"The recipe {path} is not TOML.", why=str(error), next_step="Mend that line.") from None
    found = problems(data)
    if found:
        listed = "; ".join(f"{_line(raw, where)}{where}: {what}" for where, what in found)
        raise SpecmeterError(
            f"The recipe {path} is not valid.",
            why=listed,
            next_step="docs/recipes.md describes every key.",
            exit=Exit.USAGE,
        )
    return Recipe(data["engine"], path, hashlib.sha256(raw).hexdigest(), data)


def _line(raw: bytes, where: str) -> str:
    """``line N, `` of the table that a problem's place names, so that an editor can be pointed at it."""
    kind, _, rest = where.partition(" ")
    number = rest.split(" ")[0]
    if not number.isdigit():
        return ""
    headers = [at for at, line in enumerate(raw.decode().splitlines(), 1) if line.strip().startswith(f"[[{kind}]]")]
    return f"line {headers[int(number) - 1]}, " if int(number) <= len(headers) else ""


def combined_hash(recipes: Iterable[Recipe]) -> str:
    """One hash for several recipes: that of the one, or of their hashes in order."""
    hashes = [recipe.sha256 for recipe in recipes]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
