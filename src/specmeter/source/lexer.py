"""A quick reader of definitions and callees: what a package's index is built from.

It walks over a file's strings, comments and lines that start with ``def`` or ``class``, and keeps their nesting by
indentation; no syntax tree is made, which takes five times as long. Definitions equal those of the syntax tree. Callees
are a superset: every dotted name before an opening parenthesis (``.g`` of ``f()[0].g(x)``), those in strings and
comments too. They say which files are worth parsing, never what is in them.
"""

from __future__ import annotations

import re
from typing import Dict, List, Tuple

_TRIPLE = r'"""[^"\\]*(?:(?:\\[\s\S]|"(?!""))[^"\\]*)*"""'
_SINGLE = r'"[^"\\\n]*(?:\\[\s\S][^"\\\n]*)*"'
# Every branch starts with a literal, so that the engine can leap from one candidate to the next.
_SKIP = "|".join([_TRIPLE, _TRIPLE.replace('"', "'"), _SINGLE, _SINGLE.replace('"', "'"), r"#[^\n]*"])
_TOKEN = re.compile(_SKIP + r"|\n([ \t\f]*)((?:async[ \t]+)?def|class)[ \t]+(\w+)")
# Searched in the reversed text, where a callee follows its parenthesis, for the same reason.
_REVERSED_CALLEE = re.compile(r"\([ \t]*([\w.]+)")
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")

_QUOTES = ('"""', "'''")

Definition = Tuple[str, str, int]


def decode(data: bytes) -> str:
    """The text of a source file, by its BOM or coding line. Raises UnicodeDecodeError or LookupError."""
    for line in data.split(b"\n", 2)[:2]:
        found = _CODING.match(line)
        if found:
            name = found.group(1).decode("ascii")
            return data.decode("utf-8-sig" if name.lower() in ("utf-8", "utf8") else name)
    return data.decode("utf-8-sig")


def scan(text: str) -> Tuple[List[Definition], List[str]]:
    """Definitions as ``(kind, qualified name, line)`` with kind ``class`` or ``function``, and the sorted callees."""
    text = "\n" + text.replace("\r\n", "\n").replace("\r", "\n")
    definitions: List[Definition] = []
    stack: List[Tuple[int, str, str]] = []
    line, counted, last = 0, 0, 0
    for found in _TOKEN.finditer(text):
        if found.lastindex is None:
            if text.startswith(_QUOTES, found.start()):
                _close(stack, text, last, found.start())
                last = found.end()
            continue
        start = found.start(2)
        line += text.count("\n", counted, start)
        counted = start
        kind = "class" if found.group(2) == "class" else "function"
        indent = len(found.group(1).expandtabs(8))
        while stack and stack[-1][0] >= indent:
            stack.pop()
        _close(stack, text, last, found.start())
        last = start
        prefix = "" if not stack else stack[-1][1] + ("." if stack[-1][2] == "class" else ".<locals>.")
        name = prefix + found.group(3)
        stack.append((indent, name, kind))
        definitions.append((kind, name, line))
    callees = {name[::-1] for name in set(_REVERSED_CALLEE.findall(text[::-1]))}
    return definitions, sorted(callees)


def _close(stack: List[Tuple[int, str, str]], text: str, start: int, end: int) -> None:
    """Drop the definitions from ``stack`` whose block a line of ``text[start:end]`` ends."""
    while stack and _closed(stack[-1][0]).search(text, start, end):
        stack.pop()


_CLOSED: Dict[int, "re.Pattern[str]"] = {}


def _closed(indent: int) -> "re.Pattern[str]":
    """Finds a line of code that is not indented further than ``indent``: it ends the block of a definition there."""
    if indent not in _CLOSED:
        # Brackets and quotes may begin the rest of a longer statement, and "else" and its like go on with one.
        _CLOSED[indent] = re.compile(r"\n[ \t]{0,%d}(?![ \t])[^\s#)\]}'\"]" % indent)
    return _CLOSED[indent]
