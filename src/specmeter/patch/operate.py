"""Put the lines of a patch into a file, and take them out again, so that a kill at any moment leaves a way back.

Order of ``apply``: folder with runtime, backup, new file, manifest; then one rename over the file; then stale byte
code goes. Order of ``restore``: the backup is renamed over the file (it needs no room on a full disk); byte code is put
back; the manifest goes, then the folder. Before the manifest is there, or after it has gone, the file is the original;
between, its hash says which side of the rename it is on.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import shutil
import time
from typing import Any, Dict, Mapping, Optional

from . import index
from . import state as states
from .block import CodeError, check_addition, find_block, make_block
from .disk import (
    Refused,
    check_target,
    compiled_files,
    explain,
    facts_of,
    keep,
    locked,
    read,
    remove,
    sha256,
    sync,
    write_like,
    write_new,
)
from .state import State, look

_DIFF_LINES = 60


def preview(path: str) -> Dict[str, Any]:
    """What ``apply`` would do to ``path``: facts, the added lines, or the refusal. Changes nothing."""
    try:
        state = _look(path)
    except Refused as refusal:
        unread = {"path": path, "kind": "unreadable", "sha256": None, "folder": None, "manifest": None}
        return {**unread, "refused": _as_json(refusal)}
    answer = state.as_json()
    try:
        if state.kind not in (states.APPLIED, states.UNFINISHED, states.ORIGINAL_BACK, states.CLEAN):
            raise _not_ours(state)
        check_target(state.path)
        data = state.data or b""
        if state.kind != states.APPLIED:
            block = make_block(data, os.path.join(state.folder, "start.py"), "ID")
            _check(state.path, data, data + block)
            answer["lines"] = block.decode("ascii")
        answer["facts"] = facts_of(state.path)
    except Refused as refusal:
        answer["refused"] = _as_json(refusal)
    return answer


def _as_json(refusal: Refused) -> Dict[str, str]:
    return {"what": refusal.what, "why": refusal.why, "next": refusal.next, "diff": refusal.diff}


def _look(path: str) -> State:
    """The state of ``path``. Raises Refused where something else than a file that can be read is in its place."""
    try:
        return look(path)
    except OSError as error:
        why = f"{error.strerror or error}"
        after = f"Move it away; if it was patched, `specmeter patch restore --keep-changes {path}` lets the backup go."
        if error.errno not in (errno.EISDIR, errno.EINVAL):
            after = "Make it readable, then try again."
        raise Refused(f"{path} cannot be read.", f"{why[:1].upper()}{why[1:]}.", after) from None


def apply(path: str, files: Mapping[str, bytes], facts: Mapping[str, Any], expected: Optional[str] = None) -> str:
    """Patch ``path``; ``files`` (relative name -> bytes) go into the folder, ``facts`` into the manifest.

    ``expected`` is the sha256 that the file was planned with. Gives ``applied``, or ``already`` when there was nothing
    to do. Raises Refused: nothing was changed.
    """
    path = os.path.realpath(path)
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise Refused(f"{path} cannot be patched.", "Its folder is not there.")
    with locked(parent):
        state = _look(path)
        if state.kind == states.APPLIED:
            _remove_stale(state)
            return "already"
        if state.kind in (states.UNFINISHED, states.ORIGINAL_BACK):
            _finish_restore(state)
        elif state.kind != states.CLEAN:
            raise _not_ours(state)
        check_target(path)
        try:
            _apply(path, files, facts, expected)
        except OSError as error:
            if look(path).kind != states.APPLIED:
                _undo(path)
                raise explain(path, error) from None
        except Refused:
            _undo(path)
            raise
    return "applied"


def restore(path: str, keep_changes: bool = False) -> str:
    """Put the original back: the very bytes, owner, mode and times. Gives ``restored``, ``already`` or ``kept``.

    Raises Refused with the difference when somebody else has changed the file since; with ``keep_changes`` only our
    own lines are then taken out.
    """
    path = os.path.realpath(path)
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        index.forget(path)
        return "already"
    with locked(parent):
        state = _look(path)
        if state.kind == states.CLEAN:
            _undo(path)  # an empty folder may be left of an apply or restore that was cut short
            return "already"
        outcome = "restored"
        try:
            if state.kind == states.APPLIED:
                _exchange(state)
            elif state.kind not in (states.UNFINISHED, states.ORIGINAL_BACK):
                if not keep_changes:
                    raise _not_ours(state)
                _take_out(state)
                outcome = "kept"
            _finish_restore(state)
        except OSError as error:
            raise explain(path, error) from None
    return outcome


def _apply(path: str, files: Mapping[str, bytes], facts: Mapping[str, Any], expected: Optional[str]) -> None:
    folder = states.folder_of(path)
    data = read(path)
    if expected is not None and sha256(data) != expected:
        raise Refused(f"{path} is not the file that was planned.", "It was changed meanwhile.", "Plan again.")
    block = make_block(data, os.path.join(folder, "start.py"), str(facts.get("id", "")))
    _check(path, data, data + block)
    index.remember(path)
    for each in (os.path.dirname(folder), folder):
        os.makedirs(each, 0o700, exist_ok=True)
    for name, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(folder, name)), 0o700, exist_ok=True)
        write_new(os.path.join(folder, name), content)
    backup, new = os.path.join(folder, states.ORIGINAL), os.path.join(folder, states.NEW)
    keep(path, backup)
    compiled = {}
    for item in compiled_files(path):
        keep(item, os.path.join(folder, os.path.basename(item)))
        compiled[os.path.basename(item)] = sha256(read(item))
    write_like(new, data + block, path)
    manifest = {
        "format": states.FORMAT,
        "path": path,
        "original_sha256": sha256(data),
        "patched_sha256": sha256(data + block),
        "original": facts_of(path),
        "compiled": compiled,
        "applied_ns": time.time_ns(),
        **facts,
    }
    write_new(os.path.join(folder, states.MANIFEST + ".new"), json.dumps(manifest).encode())
    os.rename(os.path.join(folder, states.MANIFEST + ".new"), os.path.join(folder, states.MANIFEST))
    sync(folder)
    if read(path) != data or read(backup) != data:
        raise Refused(f"{path} was changed while it was being patched.", next="Plan again.")
    os.rename(new, path)
    sync(os.path.dirname(path))
    _remove_stale(look(path))


def _exchange(state: State) -> None:
    """Rename the backup over the file; where the backup is damaged, the original is what stands before our lines."""
    manifest = state.manifest or {}
    backup = os.path.join(state.folder, states.ORIGINAL)
    try:
        good = sha256(read(backup)) == manifest["original_sha256"]
    except FileNotFoundError:
        good = False
    if not good:
        data = (state.data or b"")[: int(manifest["original"]["size"])]
        if sha256(data) != manifest["original_sha256"]:
            raise Refused(
                f"The backup of {state.path} is damaged, and the file does not hold the original either.",
                next=f"Look at {state.folder}; reinstalling the package gives the original back.",
            )
        remove(backup)
        write_like(backup, data, state.path)
        os.utime(backup, ns=(time.time_ns(), int(manifest["original"]["mtime_ns"])))
    os.rename(backup, state.path)
    sync(os.path.dirname(state.path))


def _take_out(state: State) -> None:
    """Write the file without our lines, everything else of it kept."""
    block = find_block(state.data) if state.data is not None else None
    if state.data is None or block is None:
        return
    before, _, after = state.data.partition(block)
    folder = os.path.dirname(state.folder)
    os.makedirs(folder, 0o700, exist_ok=True)
    new = os.path.join(folder, states.NEW + ".taken-out")
    remove(new)
    write_like(new, before + after, state.path)
    os.rename(new, state.path)
    sync(os.path.dirname(state.path))


def _remove_stale(state: State) -> None:
    """Remove byte code of the original: Python checks time and size, but not where it was compiled `unchecked`."""
    compiled = (state.manifest or {}).get("compiled", {})
    for item in compiled_files(state.path):
        if sha256(read(item)) == compiled.get(os.path.basename(item)):
            remove(item)


def _finish_restore(state: State) -> None:
    """The file is the original (or somebody else's): put byte code back, then let manifest and folder go."""
    folder = state.folder
    if state.manifest is not None and state.kind in (states.APPLIED, states.ORIGINAL_BACK):
        compiled = state.manifest["compiled"]
        for item in compiled_files(state.path):
            if sha256(read(item)) != compiled.get(os.path.basename(item)):
                remove(item)  # of the patched file
        for name in compiled:
            backup = os.path.join(folder, name)
            if os.path.exists(backup) and os.path.isdir(os.path.join(os.path.dirname(state.path), "__pycache__")):
                os.rename(backup, os.path.join(os.path.dirname(state.path), "__pycache__", name))
    remove(os.path.join(folder, states.MANIFEST))
    _undo(state.path)


def _undo(path: str) -> None:
    """Remove the folder, the manifest first; the file is not touched."""
    folder = states.folder_of(path)
    remove(os.path.join(folder, states.MANIFEST))
    shutil.rmtree(folder, ignore_errors=True)
    remove(os.path.join(os.path.dirname(folder), states.NEW + ".taken-out"))
    try:
        os.rmdir(os.path.dirname(folder))
    except OSError:
        pass  # another file of this folder is patched too
    index.forget(path)


def _check(path: str, data: bytes, new: bytes) -> None:
    try:
        check_addition(data, new, path)
    except CodeError as error:
        raise Refused(f"{path} cannot take the lines of a patch.", f"{error}.") from None


def _not_ours(state: State) -> Refused:
    restore_kept = f"`specmeter patch restore --keep-changes {state.path}`"
    if state.kind == states.GONE:
        why = "Somebody removed it, so there is nothing to put back (the package was uninstalled?)."
        return Refused(f"{state.path} is gone since it was patched.", why, f"{restore_kept} lets the backup go.")
    if state.kind == states.DAMAGED:
        why = f"{state.folder}/{states.MANIFEST} cannot be read or is of another version of specmeter."
        return Refused(f"The patch of {state.path} cannot be judged.", why, f"Look at {state.folder}.")
    if state.kind == states.NO_BACKUP:
        why = (
            "The lines of a patch are in it, but the folder with its backup is not (a copied or rebuilt environment?)."
        )
        return Refused(f"{state.path} holds the lines of a patch.", why, f"{restore_kept} takes just them out.")
    why = "It is neither the original nor what the patch made of it; restoring would undo that change too."
    return Refused(
        f"{state.path} was changed by somebody else since it was patched.",
        why,
        f"{restore_kept} takes our lines out and leaves the rest.",
        _difference(state),
    )


def _difference(state: State) -> str:
    """What somebody else changed: a unified diff from the patched text to the file, cut after some lines."""
    try:
        original = read(os.path.join(state.folder, states.ORIGINAL))
    except OSError:
        return ""
    block = make_block(original, os.path.join(state.folder, "start.py"), str((state.manifest or {}).get("id", "")))
    texts = [data.decode("utf-8", "backslashreplace").splitlines() for data in (original + block, state.data or b"")]
    lines = list(difflib.unified_diff(texts[0], texts[1], "as patched", "as it is now", lineterm="", n=1))
    rest = len(lines) - _DIFF_LINES
    return "\n".join([*lines[:_DIFF_LINES], *([f"... and {rest} lines more"] if rest > 0 else [])])
