"""What a kernel is, by its name: classes from patterns kept as data, and lm_head by its place in a forward."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Ints = NDArray[np.int64]

CLASSES = (
    "attention", "dense_gemm", "experts", "collectives", "norm_elementwise", "rope_kv", "lm_head", "sampling", "copy",
    "probe", "other",
)  # fmt: skip
ATTENTION, GEMM, EXPERTS, COLLECTIVES, ELEMENTWISE, ROPE_KV, LM_HEAD, SAMPLING, COPY, PROBE, OTHER = range(len(CLASSES))
TITLES = {
    "dense_gemm": "dense GEMM", "norm_elementwise": "norm, elementwise", "rope_kv": "rope, KV writes",
    "probe": "specmeter's stamps",
}  # fmt: skip
# A GEMM at the end of a forward that takes so many times the forward's median one is lm_head: a layer's largest
# product is 2 to 3 times its median, and without lm_head the last one is the layer's down projection, about 1.
LM_HEAD_FACTOR = 1.5
_LONGEST_PATTERN = 500
_SPLIT_K = re.compile(r"split_?k_?reduce", re.IGNORECASE)


@dataclass(frozen=True)
class Patterns:
    """Patterns in order: (class, compiled pattern); ``source`` names where they come from."""

    rules: tuple[tuple[int, re.Pattern[str]], ...]
    source: str

    def classify(self, name: str) -> int:
        """The class of a kernel's name; OTHER where no pattern is found in it."""
        return next((code for code, pattern in self.rules if pattern.search(name)), OTHER)

    def before(self, more: Patterns) -> Patterns:
        """These patterns, then the others."""
        return Patterns((*self.rules, *more.rules), f"{self.source}, then {more.source}")


@cache
def default_patterns() -> Patterns:
    """The patterns that come with specmeter."""
    text = resources.files("specmeter.analysis").joinpath("kernel_classes.toml").read_text(encoding="utf-8")
    return _parsed(text, "specmeter's patterns")


def read_patterns(path: Path) -> Patterns:
    """A user's own file, whose patterns go before specmeter's.

    Raises SpecmeterError for a file that cannot be read, is no TOML, or holds an unknown class or a broken pattern.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecmeterError(f"{path} cannot be read.", str(error)) from error
    return _parsed(text, str(path)).before(default_patterns())


def _parsed(text: str, source: str) -> Patterns:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecmeterError(f"{source} is not valid TOML.", str(error)) from error
    listed = document.get("class")
    if document.get("schema") != 1 or not isinstance(listed, list):
        raise SpecmeterError(f"{source} holds no kernel classes.", next_step="Write schema = 1 and [[class]] tables.")
    rules = []
    for entry in listed:
        name, patterns = (entry.get("name"), entry.get("patterns")) if isinstance(entry, dict) else (None, None)
        if name not in CLASSES or not isinstance(patterns, list):
            raise SpecmeterError(
                f"{source} names the class {name!r}.",
                "It is none of those known, or has no list of patterns.",
                f"Classes are {', '.join(CLASSES)}.",
            )
        rules += [(CLASSES.index(name), _compiled(pattern, source)) for pattern in patterns]
    return Patterns(tuple(rules), source)


def _compiled(pattern: Any, source: str) -> re.Pattern[str]:
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _LONGEST_PATTERN:
        raise SpecmeterError(f"{source} holds a pattern that is no text of 1 to {_LONGEST_PATTERN} characters.")
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise SpecmeterError(f"{source} holds a broken pattern: {pattern!r}", str(error)) from error


def classes_of(names: Sequence[str], patterns: Patterns | None = None) -> Ints:
    """The class of each name."""
    patterns = patterns or default_patterns()
    return np.array([patterns.classify(name) for name in names], np.int64)


def mark_lm_head(
    kinds: Ints, names: Sequence[str], name: Ints, dur_ns: Ints, forward: Ints, is_head: NDArray[np.bool_]
) -> Ints:
    """``kinds`` with lm_head told from other GEMMs; all arrays have one entry a kernel, in order of begin.

    ``forward`` numbers the forwards (the kernels that one host call launched; -1: none) and ``is_head`` says that the
    call's point is an lm_head by its own name (``verify.logits``, ``draft.head``): there every GEMM is one. Elsewhere
    it is the last GEMM after the last attention before the tokens are chosen (or the forward ends), if it takes
    LM_HEAD_FACTOR times the forward's median GEMM. A reduction of split-K parts right behind it belongs to it.
    """
    out: Ints = kinds.copy()
    splits = np.array([bool(_SPLIT_K.search(one)) for one in names] or [False])
    gemm = kinds == GEMM
    out[gemm & is_head] = LM_HEAD
    at = np.flatnonzero((forward >= 0) & ~is_head & np.isin(kinds, (GEMM, ATTENTION, SAMPLING)))
    at = at[np.argsort(forward[at], kind="stable")]
    for mine in np.split(at, np.flatnonzero(np.diff(forward[at])) + 1):
        out[_heads(mine, kinds[mine], dur_ns[mine], splits[name[mine]])] = LM_HEAD
    return out


def _heads(at: Ints, kinds: Ints, dur_ns: Ints, split: NDArray[np.bool_]) -> list[int]:
    """The positions among ``at`` (one forward's GEMMs, attention and sampling, in order) that are an lm_head."""
    whole = (kinds == GEMM) & ~split
    if not bool((kinds == ATTENTION).any()) or np.count_nonzero(whole) < 2:
        return []
    least = LM_HEAD_FACTOR * float(np.median(dur_ns[whole]))
    found: list[int] = []
    last = -1
    seen = False
    # One more round, so that the end of the forward is a place where tokens may be chosen.
    for i in range(len(at) + 1):
        kind = int(kinds[i]) if i < len(at) else SAMPLING
        if kind == ATTENTION:
            last, seen = -1, True
        elif kind == GEMM and not split[i]:
            last = i
        elif kind == SAMPLING and last >= 0 and seen:
            if dur_ns[last] >= least:
                found.append(int(at[last]))
                found += [int(at[j]) for j in range(last + 1, min(i, len(at))) if split[j]]
            last = -1
    return found
