"""One Python source file as bytes: encoding, line ends, hash, syntax tree."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import stat
import tokenize
import zipfile
from dataclasses import dataclass
from typing import List, Tuple


class SourceError(Exception):
    """A file or module that cannot be read as source. ``reason`` says why; ``reached`` says how far the search got."""

    def __init__(self, reason: str, reached: str = "", nearest: Tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.reached = reached
        self.nearest = nearest


@dataclass(frozen=True)
class PyFile:
    """A source file. ``sha256`` is over the raw bytes, as the server's import hook will hash them."""

    path: str
    data: bytes
    mtime_ns: int
    sha256: str

    def encoding(self) -> str:
        """The name of the encoding that Python reads the file with; ``utf-8-sig`` where it starts with a BOM."""
        try:
            return tokenize.detect_encoding(io.BytesIO(self.data).readline)[0]
        except SyntaxError as error:
            raise SourceError(f"{self.path}: {error}") from None

    def newline(self) -> str:
        """``LF``, ``CRLF``, ``CR`` or ``mixed``."""
        crlf = self.data.count(b"\r\n")
        lf = self.data.count(b"\n") - crlf
        cr = self.data.count(b"\r") - crlf
        kinds = [name for name, count in (("CRLF", crlf), ("LF", lf), ("CR", cr)) if count]
        return kinds[0] if len(kinds) == 1 else "mixed" if kinds else "LF"

    def lines(self) -> List[str]:
        """The text's lines without their ends, numbered as in the syntax tree."""
        try:
            text = self.data.decode(self.encoding())
        except (UnicodeDecodeError, LookupError) as error:
            raise SourceError(f"{self.path}: not readable in its stated encoding: {error}") from None
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return lines[:-1] if lines[-1] == "" else lines

    def tree(self) -> ast.Module:
        """The syntax tree, parsed by the running interpreter's own grammar."""
        try:
            return ast.parse(self.data, self.path)
        except (SyntaxError, ValueError) as error:
            where = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise SourceError(f"{self.path}: not valid for this Python{where}: {error}") from None
        except RecursionError:
            raise SourceError(f"{self.path}: nested too deeply to parse") from None


def read(path: str) -> PyFile:
    """Read a source file; a member of a zip archive is named ``ARCHIVE.zip/pkg/module.py``.

    Raises SourceError when the file cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            raise SourceError(f"{path}: it is no file but a pipe or a device")  # opening one could wait for ever
        with open(path, "rb") as handle:
            data = handle.read()
            mtime_ns = os.fstat(handle.fileno()).st_mtime_ns
    except NotADirectoryError:
        return _read_zipped(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from None
    return PyFile(path, data, mtime_ns, hashlib.sha256(data).hexdigest())


def split_zip(path: str) -> Tuple[str, str]:
    """The archive and the member of a path inside a zip archive, or two empty strings."""
    head, tail = path, ""
    while head and head != os.path.dirname(head):
        if os.path.isfile(head):
            return (head, tail) if tail else ("", "")
        head, part = os.path.split(head)
        tail = part + "/" + tail if tail else part
    return "", ""


def _read_zipped(path: str) -> PyFile:
    archive, member = split_zip(path)
    try:
        with zipfile.ZipFile(archive) as opened:
            data = opened.read(member)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path}: {error}") from None
    return PyFile(path, data, os.stat(archive).st_mtime_ns, hashlib.sha256(data).hexdigest())
