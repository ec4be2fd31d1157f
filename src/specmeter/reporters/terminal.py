"""The report as text. One visual language for every kind of document: the verdict first, then the bar, tables, and how
sure all of it is. Plain when piped or under NO_COLOR; as wide as the terminal."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.text import Text

from specmeter.errors import SpecmeterError
from specmeter.reporters.damage import readable
from specmeter.reporters.inert import inert
from specmeter.reporters.language import VERDICTS, verdict_line

View = Callable[[Mapping[str, Any], int], Iterator[RenderableType]]
"""Gives the parts of a report, in order, from a document and the width in columns."""

# Kind of document -> module and function of its view; a module is imported when a document of its kind is shown.
VIEWS: dict[str, str] = {
    "profile": "specmeter.reporters.profile_view:profile_parts",
    "sweep": "specmeter.reporters.sweep_view:sweep_parts",
    "bench": "specmeter.reporters.bench_view:bench_parts",
    "check": "specmeter.reporters.check_view:check_parts",
    "diff": "specmeter.reporters.diff_view:diff_parts",
    "compare": "specmeter.reporters.compare_view:compare_parts",
    "explain": "specmeter.reporters.explain_view:explain_parts",
    "figures": "specmeter.reporters.figures_view:figures_parts",
    "gate": "specmeter.reporters.gate_view:gate_parts",
    "tune": "specmeter.reporters.tune_view:tune_parts",
}
DEFAULT_WIDTH, LEAST_WIDTH = 100, 40


def print_analysis(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print an analysis document: ``COLUMNS`` or the terminal's width, 100 when piped; colour on a terminal only.

    Characters that the output's encoding lacks become ``?``. Raises SpecmeterError for a kind that has no view.
    """
    out = sys.stdout if file is None else file
    _write(out, _shown(document, output_width(out), shows_colour(out)))


def print_headed(sentence: object, word: str, body: str, file: IO[str] | None = None) -> None:
    """Print a verdict as every report begins, and below it a command's own lines, made inert.

    A line is broken between words, its rest indented; a word (a path, an address) stays whole, however narrow.
    """
    out = sys.stdout if file is None else file
    parts: list[RenderableType] = [verdict_line(sentence, word), "", *_broken(body, output_width(out))]
    _write(out, _rendered(parts, output_width(out), shows_colour(out)))


def print_lines(body: str, file: IO[str] | None = None) -> None:
    """Print a command's own lines, made inert, and broken as ``print_headed`` does on a terminal or with ``COLUMNS``.

    In a pipe they stay whole, for the program that reads them.
    """
    out = sys.stdout if file is None else file
    fixed = out.isatty() or bool(os.environ.get("COLUMNS"))
    lines = _broken(body, output_width(out) if fixed else None)
    _write(out, _rendered(lines, output_width(out), shows_colour(out)))


def _broken(body: str, width: int | None) -> Iterator[Text]:
    for line in body.splitlines():
        shown = inert(line, 4000)
        indent = " " * min(len(shown) - len(shown.lstrip()) + 2, 8)
        broken = [shown] if width is None else textwrap.wrap(
            shown, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
            drop_whitespace=True,
        )  # fmt: skip
        yield from (_line(piece) for piece in broken or [""])


def _line(text: str) -> Text:
    """A line as it is, the severity it begins with in its colour."""
    found = Text(text, no_wrap=True)
    word = text.partition(":")[0]
    if word in VERDICTS:
        found.stylize(VERDICTS[word], 0, len(word) + 1)
    return found


def _write(out: IO[str], text: str) -> None:
    encoding = getattr(out, "encoding", None) or "utf-8"
    out.write(text.encode(encoding, "replace").decode(encoding))


def render_analysis(document: Mapping[str, Any], width: int = DEFAULT_WIDTH) -> str:
    """An analysis document as plain text, ``width`` columns wide."""
    return _shown(document, width, False)


def output_width(out: IO[str]) -> int:
    """Columns to write in: ``COLUMNS``, else the terminal's, else 100; at least 40."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit() and int(asked) > 0:
        return max(int(asked), LEAST_WIDTH)
    return max(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, LEAST_WIDTH) if out.isatty() else DEFAULT_WIDTH


def shows_colour(out: IO[str]) -> bool:
    """Whether escape codes may be written: a terminal that is not dumb, and no ``NO_COLOR`` (no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _shown(document: Mapping[str, Any], width: int, colour: bool) -> str:
    view = _view(document)
    with readable("The analysis"):
        return _rendered(view(document, width), width, colour)


def _rendered(parts: Iterable[RenderableType], width: int, colour: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, highlight=False, markup=False, emoji=False, legacy_windows=False,
        force_terminal=colour, no_color=False, color_system="standard" if colour else None,
    )  # fmt: skip
    for part in parts:
        # A command line is for copying, so it is not broken.
        console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _view(document: Mapping[str, Any]) -> View:
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in VIEWS:
        raise SpecmeterError(f"There is no report for an analysis of kind {inert(kind)}")
    module, _, name = VIEWS[kind].partition(":")
    return cast(View, getattr(import_module(module), name))
