"""Which kernels are collectives, by their names: whose they are and what they do. The patterns are data."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OTHER = "other"
"""The operation of a collective whose name does not tell it, as NCCL's generic kernels."""


@dataclass(frozen=True)
class CollectiveKernel:
    """What a kernel's name says of it: ``backend`` and ``operation`` in words.

    ``by_nccl``: NCCL's variables can change it. ``needs_all``: on no rank can it end before it has begun on every one.
    """

    backend: str
    operation: str
    by_nccl: bool
    needs_all: bool


@dataclass(frozen=True)
class _Rule:
    name: str
    pattern: re.Pattern[str]
    fact: bool


@lru_cache(maxsize=8192)
def collective_of(name: str) -> CollectiveKernel | None:
    """The collective that a kernel of this ``name`` is; None for one that is none."""
    backends, operations = _rules()
    backend = next((rule for rule in backends if rule.pattern.search(name)), None)
    if backend is None:
        return None
    operation = next((rule for rule in operations if rule.pattern.search(name)), None)
    return CollectiveKernel(
        backend.name, operation.name if operation else OTHER, backend.fact, operation is not None and operation.fact
    )


@lru_cache(maxsize=1)
def _rules() -> tuple[tuple[_Rule, ...], tuple[_Rule, ...]]:
    text = files(__package__).joinpath("collective_kernels.toml").read_text(encoding="utf-8")
    document: dict[str, Any] = tomllib.loads(text)

    def rules(table: str, fact: str) -> tuple[_Rule, ...]:
        return tuple(_Rule(row["name"], re.compile(row["pattern"], re.I), bool(row[fact])) for row in document[table])

    return rules("backend", "served_by_nccl"), rules("operation", "all")
