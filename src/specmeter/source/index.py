"""The index of a whole package: every file with its definitions and callees, cached by path, size, time and hash.

A file is read again when its size or modification time differs from the cache's, or when it was modified so shortly
before the cache was written that a later change could carry the same time. Reading is shared over the cores.
"""

from __future__ import annotations

import gc
import hashlib
import marshal
import os
import re
import stat
import sys
import tempfile
import time
from typing import Dict, Iterator, List, Optional, Tuple

from . import lexer
from .pyfile import SourceError

# size, mtime_ns, sha256, definitions, callees, problem. The two lists are kept as text, one item a line: half a million
# small objects would take longer to load than the files take to be listed.
Entry = Tuple[int, int, str, str, str, str]
Index = Dict[str, Entry]

_FORMAT = 2
_RACY_NS = 2_000_000_000
_SHARE = 64
"""Fewer files than this are read by one process: starting another takes longer."""


def cache_dir() -> str:
    """Where indexes are kept: ``$XDG_CACHE_HOME/specmeter/index``, or below the home directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "specmeter", "index")


def build(root: str, cache: Optional[str] = None) -> Tuple[Index, int]:
    """The index of every ``.py`` file below ``root`` by path relative to it, and how many files had to be read.

    ``cache`` is the folder of the cache, ``cache_dir()`` if None; one that cannot be written is done without. Raises
    SourceError when ``root`` is not a folder.
    """
    if not os.path.isdir(root):
        raise SourceError(f"{root} is not a folder")
    collecting = gc.isenabled()
    # Hundreds of thousands of tuples and no cycle among them: the collector would take as long as the reading.
    gc.disable()
    try:
        return _build(os.path.realpath(root), cache or cache_dir())
    finally:
        if collecting:
            gc.enable()


def _build(root: str, cache: str) -> Tuple[Index, int]:
    stored = os.path.join(cache, hashlib.sha256(root.encode()).hexdigest()[:24] + ".index")
    written_ns, known = _load(stored, root)
    index: Index = {}
    changed: List[Tuple[str, int, int]] = []
    for path, size, mtime_ns in _walk(root):
        entry = known.get(path)
        if entry is not None and entry[:2] == (size, mtime_ns) and mtime_ns < written_ns - _RACY_NS:
            index[path] = entry
        else:
            changed.append((path, size, mtime_ns))
    if changed or len(index) != len(known):
        index.update(_read_all(root, changed))
        _store(stored, root, index)
    return dict(sorted(index.items())), len(changed)


def search(index: Index, pattern: str) -> List[str]:
    """Paths of the files with a definition or callee that ``pattern`` is found in. Raises SourceError if not valid."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise SourceError(f"{pattern!r} is not a regular expression: {error}") from None
    return [path for path, entry in index.items() if _holds(entry, wanted)]


def definitions(entry: Entry) -> List[lexer.Definition]:
    """The file's definitions as ``(kind, qualified name, line)``."""
    rows = [row.split("\t") for row in entry[3].splitlines()]
    return [(kind, name, int(line)) for kind, name, line in rows]


def _holds(entry: Entry, wanted: "re.Pattern[str]") -> bool:
    names = [row.split("\t")[1] for row in entry[3].splitlines()]
    return any(map(wanted.search, names)) or any(map(wanted.search, entry[4].splitlines()))


def _walk(root: str) -> Iterator[Tuple[str, int, int]]:
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except OSError:
            continue
        for entry in entries:
            path = os.path.join(folder, entry.name) if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    pending.append(path)
            elif entry.name.endswith(".py"):
                try:
                    found = entry.stat()
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
                    yield path, found.st_size, found.st_mtime_ns


def _read_all(root: str, files: List[Tuple[str, int, int]]) -> Index:
    workers = min(os.cpu_count() or 1, len(files) // _SHARE + 1) if hasattr(os, "fork") else 1
    if workers == 1:
        return dict(_read(root, files))
    # By size, dealt out in turn: every worker gets about the same number of bytes.
    ordered = sorted(files, key=lambda item: -item[1])
    children = [_start(root, ordered[number::workers]) for number in range(1, workers)]
    result = dict(_read(root, ordered[::workers]))
    for child, pipe in children:
        with os.fdopen(pipe, "rb") as stream:
            content = stream.read()
        os.waitpid(child, 0)
        if not content:
            raise SourceError("a process that reads files for the index ended early")
        result.update(marshal.loads(content))
    return result


def _start(root: str, files: List[Tuple[str, int, int]]) -> Tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as stream:
            stream.write(marshal.dumps(dict(_read(root, files))))
    finally:
        # The child shares the parent's buffers and exit handlers: it must run none of them.
        os._exit(0)


def _read(root: str, files: List[Tuple[str, int, int]]) -> Iterator[Tuple[str, Entry]]:
    for path, size, mtime_ns in files:
        digest, defined, called, problem = "", "", "", ""
        try:
            with open(os.path.join(root, path), "rb") as handle:
                data = handle.read()
            digest = hashlib.sha256(data).hexdigest()
            found, callees = lexer.scan(lexer.decode(data))
            defined = "\n".join(f"{kind}\t{name}\t{line}" for kind, name, line in found)
            called = "\n".join(callees)
        except (OSError, UnicodeDecodeError, LookupError) as error:
            problem = str(error)
        yield path, (size, mtime_ns, digest, defined, called, problem)


def _load(stored: str, root: str) -> Tuple[int, Index]:
    try:
        with open(stored, "rb") as handle:
            content = marshal.load(handle)
        if content["format"] == [_FORMAT, sys.implementation.cache_tag, root]:
            return content["written_ns"], content["index"]
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        pass
    return 0, {}


def _store(stored: str, root: str, index: Index) -> None:
    content = {"format": [_FORMAT, sys.implementation.cache_tag, root], "written_ns": time.time_ns(), "index": index}
    try:
        os.makedirs(os.path.dirname(stored), mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(stored))
        with os.fdopen(handle, "wb") as stream:
            marshal.dump(content, stream)
        os.replace(temporary, stored)
    except OSError:
        # Without a cache the next call takes as long as this one did; nothing else is lost.
        pass
