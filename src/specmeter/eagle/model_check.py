"""The manifest of a cached model directory, and what tells a whole directory from a broken one."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.eagle.model_wheel import ModelPackage, sha256_of

MANIFEST = "specmeter-model.json"
SCHEMA = "specmeter/model/1"
WEIGHTS = "model.safetensors"
# No header of a model this size comes near this; a larger length means the file is not what it should be.
MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Damage:
    """Why a model directory cannot be used: the file and what is wrong with it."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def write_manifest(package: ModelPackage, directory: Path) -> None:
    """Record size and SHA-256 of every file in ``directory``, and the SHA-256 of the weights' header alone."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
        if path.is_file()
    }
    document = {
        "schema": SCHEMA,
        "source": {"requirement": package.requirement, "wheel_sha256": package.wheel_sha256},
        "weights_header_sha256": _header_sha256(directory / WEIGHTS),
        "files": files,
    }
    with (directory / MANIFEST).open("x") as out:
        json.dump(document, out, indent=2)


def find_damage(package: ModelPackage, directory: Path, thorough: bool = False) -> Damage | None:
    """What is wrong with the directory, or None if it is whole.

    Every file's size, the small files' hashes and the weights' header are checked each time (about 20 ms);
    ``thorough`` hashes the weights as well. Files beyond the manifest are ignored.
    """
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        files = {str(name): (int(e["size"]), str(e["sha256"])) for name, e in manifest["files"].items()}
        header = str(manifest["weights_header_sha256"])
        current = manifest["schema"] == SCHEMA and manifest["source"]["wheel_sha256"] == package.wheel_sha256
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Damage(MANIFEST, f"cannot be read ({type(error).__name__})")
    if not current or WEIGHTS not in files:
        return Damage(MANIFEST, "is of another version")
    try:
        return _compare(directory, files, header, thorough)
    except OSError as error:
        return Damage(str(error.filename or directory), error.strerror or "cannot be read")


def _compare(directory: Path, files: dict[str, tuple[int, str]], header: str, thorough: bool) -> Damage | None:
    for name, (size, digest) in files.items():
        path = directory / Path(name).name
        if not path.is_file():
            return Damage(name, "is missing")
        if path.stat().st_size != size:
            return Damage(name, f"has {path.stat().st_size} bytes, not {size}")
        if (thorough or name != WEIGHTS) and sha256_of(path) != digest:
            return Damage(name, "has other contents than when it was made")
    if _header_sha256(directory / WEIGHTS) != header:
        return Damage(WEIGHTS, "has another header than when it was made")
    return None


def _header_sha256(weights: Path) -> str:
    with weights.open("rb") as source:
        length = source.read(8)
        count = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        return hashlib.sha256(length + source.read(min(count, MAX_HEADER_BYTES))).hexdigest()
