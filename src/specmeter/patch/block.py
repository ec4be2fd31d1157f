"""The lines that go to the end of a patched file, and the proof that they change nothing else in it."""

from __future__ import annotations

import ast
import warnings
from typing import Optional

FOLDER = ".specmeter-patch"
_FIRST = b"# >>> specmeter patch "
_LAST = b"# <<< specmeter patch"


class CodeError(Exception):
    """Why a file cannot take the lines."""


def make_block(data: bytes, start: str, id: str) -> bytes:
    """What is appended to a file that holds ``data``: one guarded statement that runs the file ``start``.

    It leaves no name in the module, moves no line, and cannot raise an Exception into the import. Plain ASCII, because
    the file's own encoding is not known to be UTF-8.
    """
    newline = b"\r\n" if b"\r\n" in data else b"\n"
    lines = [
        _FIRST.decode() + f"{id}: `specmeter patch restore` takes these lines out",
        "try:",
        f"    (lambda file: (exec(file.read(), {{'__file__': file.name}}), file.close()))(open({start!a}))",
        "except Exception:",
        "    pass",
        _LAST.decode(),
    ]
    own_line = b"" if not data or data.endswith((b"\n", b"\r")) else newline
    return own_line + newline.join(line.encode("ascii") for line in lines) + newline


def find_block(data: bytes) -> Optional[bytes]:
    """The lines of a patch at whatever place of ``data`` they are, or None."""
    first = data.find(_FIRST)
    last = data.find(_LAST, first)
    if first < 0 or last < 0:
        return None
    end = last + len(_LAST)
    for newline in (b"\r\n", b"\n"):
        if data.startswith(newline, end):
            end += len(newline)
            break
    return data[first:end]


def check_addition(old: bytes, new: bytes, path: str) -> None:
    """Compile ``new`` and make sure that its syntax tree is that of ``old``, positions too, plus one last statement.

    Uses the grammar of the running interpreter, which has to be the server's. Raises CodeError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before, after = ast.parse(old, path), ast.parse(new, path)
            compile(new, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise CodeError(f"it is not valid for this Python: {error}") from None
    added = after.body[len(before.body) :]
    del after.body[len(before.body) :]
    same = ast.dump(before, include_attributes=True) == ast.dump(after, include_attributes=True)
    if not same or len(added) != 1 or not isinstance(added[0], ast.Try):
        raise CodeError("the added lines would be read as part of what stands before them")
