"""What lies on the disk of a patch now, whatever was interrupted before."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Dict, Optional

from .block import FOLDER, find_block
from .disk import read, sha256

FORMAT = 1
MANIFEST = "manifest.json"
ORIGINAL = "original"
NEW = "new"

# The kinds of a State:
CLEAN = "clean"  # no patch
UNFINISHED = "unfinished"  # a folder without a manifest: applying or restoring was cut short, the file is the original
ORIGINAL_BACK = "original"  # a manifest, and the file is the original: cut short just before or just after the exchange
APPLIED = "applied"
CHANGED = "changed"  # somebody else wrote the file since
GONE = "gone"  # somebody else removed the file since
NO_BACKUP = "no-backup"  # the lines are in the file, but the folder with the backup is not there
DAMAGED = "damaged"  # the manifest cannot be read


@dataclass(frozen=True)
class State:
    """The state of one file: its path, a kind (above), its bytes (None when it is gone) and the manifest, if any."""

    path: str
    kind: str
    data: Optional[bytes]
    manifest: Optional[Dict[str, Any]]

    @property
    def folder(self) -> str:
        """The folder beside the file that holds backup and manifest."""
        return folder_of(self.path)

    def as_json(self) -> Dict[str, Any]:
        """The state as plain data: path, kind, sha256, folder, manifest."""
        current = None if self.data is None else sha256(self.data)
        return {
            "path": self.path,
            "kind": self.kind,
            "sha256": current,
            "folder": self.folder if os.path.isdir(self.folder) else None,
            "manifest": self.manifest,
        }


def folder_of(path: str) -> str:
    """Where backup and manifest of ``path`` are kept: beside it, one folder a file name."""
    folder, name = os.path.split(path)
    return os.path.join(folder, FOLDER, name)


def look(path: str) -> State:
    """Read the state of ``path`` (symbolic links followed). Raises OSError when it cannot be read."""
    path = os.path.realpath(path)
    try:
        data: Optional[bytes] = read(path)
    except FileNotFoundError:
        data = None
    folder = folder_of(path)
    if not os.path.lexists(os.path.dirname(folder)) or not os.path.isdir(folder):
        lines = data is not None and find_block(data) is not None
        return State(path, NO_BACKUP if lines else CLEAN, data, None)
    try:
        manifest = json.loads(read(os.path.join(folder, MANIFEST)))
    except FileNotFoundError:
        lines = data is not None and find_block(data) is not None
        return State(path, NO_BACKUP if lines else UNFINISHED, data, None)
    except ValueError:
        return State(path, DAMAGED, data, None)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return State(path, DAMAGED, data, None)
    return State(path, _kind(data, manifest), data, manifest)


def _kind(data: Optional[bytes], manifest: Dict[str, Any]) -> str:
    if data is None:
        return GONE
    digest = sha256(data)
    if digest == manifest["patched_sha256"]:
        return APPLIED
    return ORIGINAL_BACK if digest == manifest["original_sha256"] else CHANGED
