"""Versions of an engine: found in the environment's metadata, compared with a recipe's ranges.

The order is that of PEP 440 on release and post numbers. Development, pre-release and local parts are left out on
purpose: a nightly build of 0.5.13 has the code of 0.5.13 and should meet the same anchors.
"""

from __future__ import annotations

import os
import re
from typing import Dict, List, Optional, Sequence, Tuple

_VERSION = re.compile(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)(.*)$")
_POST = re.compile(r"(?:\.post|-|\.rev|\.r)(\d+)")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*(\S+)\s*$")
_LITERAL = re.compile(rb"""^(?:__version__|version)\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""", re.M)
_FIELD = re.compile(rb"^Version:\s*(\S+)", re.M)

Key = Tuple[Tuple[int, ...], int]


def key(version: str) -> Optional[Key]:
    """The comparable part of a version: release numbers without trailing zeros, and the post number (0 when none)."""
    found = _VERSION.match(version)
    if not found:
        return None
    release = [int(part) for part in found.group(1).split(".")]
    while release and release[-1] == 0:
        release.pop()
    post = _POST.match(found.group(2).split("+")[0])
    return tuple(release), int(post.group(1)) if post else 0


def check_range(spec: str) -> Optional[str]:
    """What is wrong with a range such as ``>=0.5.4,<0.5.13``; None when it is well formed."""
    for clause in spec.split(",") if spec.strip() else []:
        found = _CLAUSE.match(clause)
        if not found or key(found.group(2)) is None:
            return f"{clause.strip()!r} is not a version clause such as >=0.5.4"
        if "*" in found.group(2):
            return f"{clause.strip()!r} has a wildcard: write the range out, such as >=0.5,<0.6"
    return None


def in_range(version: str, spec: str) -> bool:
    """Whether ``version`` satisfies every clause of ``spec``; an empty range admits everything."""
    own = key(version)
    if own is None:
        return False
    for clause in spec.split(",") if spec.strip() else []:
        found = _CLAUSE.match(clause)
        other = key(found.group(2)) if found else None
        if found is None or other is None or not _holds(own, found.group(1), other):
            return False
    return True


def _holds(own: Key, operator: str, other: Key) -> bool:
    return {
        ">=": own >= other,
        "<=": own <= other,
        "==": own == other,
        "!=": own != other,
        "<": own < other,
        ">": own > other,
    }[operator]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(dists: Sequence[str], entries: Sequence[str]) -> Optional[Tuple[str, str]]:
    """Name and version of the first of ``dists`` whose metadata lies in one of the path ``entries``."""
    wanted = {_normal(name): name for name in dists}
    for entry in entries:
        try:
            names = sorted(os.listdir(entry or "."))
        except OSError:
            continue
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix not in (".dist-info", ".egg-info"):
                continue
            dist = _normal(stem.split("-")[0])
            if dist in wanted:
                version = _metadata_version(os.path.join(entry, name))
                if version:
                    return wanted[dist], version
    return None


def _metadata_version(folder: str) -> Optional[str]:
    for name in ("METADATA", "PKG-INFO", ""):
        found = _search(os.path.join(folder, name) if name else folder, _FIELD)
        if found:
            return found
    return None


def _search(path: str, pattern: "re.Pattern[bytes]") -> Optional[str]:
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as handle:
            found = pattern.search(handle.read(65536))
    except OSError:
        return None
    return found.group(1).decode("utf-8", "replace") if found else None


def of_tree(dists: Sequence[str], packages: Sequence[str], roots: Sequence[str]) -> Optional[Tuple[str, str]]:
    """Name and version of an unpacked wheel or a source tree.

    Looked for in metadata below ``roots``, then in ``_version.py`` or ``version.py`` of the packages, then in
    ``PKG-INFO`` and ``pyproject.toml``.
    """
    found = installed(dists, roots)
    if found:
        return found
    candidates: Dict[str, "re.Pattern[bytes]"] = {}
    for root in roots:
        for package in packages:
            for name in ("_version.py", "version.py", "__init__.py"):
                candidates[os.path.join(root, package, name)] = _LITERAL
            candidates[os.path.join(root, f"{package}.py")] = _LITERAL
        candidates[os.path.join(root, "PKG-INFO")] = _FIELD
        candidates[os.path.join(root, "pyproject.toml")] = _LITERAL
    for path, pattern in candidates.items():
        version = _search(path, pattern)
        if version and key(version):
            return dists[0], version
    return None


def _holds_module(place: str, name: str) -> bool:
    path = os.path.join(place, name)
    return os.path.isdir(path) or os.path.isfile(f"{path}.py")


def tree_roots(path: str, packages: Sequence[str]) -> List[str]:
    """The folders that hold one of ``packages`` or a module called so: ``path``, its ``python`` or ``src``, parent."""
    places = [path, os.path.join(path, "python"), os.path.join(path, "src")]
    if os.path.basename(os.path.abspath(path)) in packages:
        places.insert(0, os.path.dirname(os.path.abspath(path)))
    roots = [place for place in places if any(_holds_module(place, name) for name in packages)]
    # A source tree keeps its metadata beside the folder with the package.
    return roots + [place for place in (path, os.path.dirname(os.path.abspath(path))) if roots and place not in roots]
