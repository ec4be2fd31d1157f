"""The parts every text report is made of: verdict, bar, table, remarks. All text that goes in is made inert here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from specmeter.reporters.inert import inert

# One letter a phase, so that a bar reads without colour too.
LETTERS = {
    "draft": "D", "verify": "V", "accept": "A", "extend": "E", "kv": "K", "schedule": "S", "wait": "w", "other": "o",
    "glue": "g", "unattributed": "?",
}  # fmt: skip
COLOURS = {
    "draft": "cyan", "verify": "magenta", "accept": "yellow", "extend": "blue", "kv": "green",
    "schedule": "bright_blue", "wait": "bright_black", "other": "white", "glue": "bright_black", "unattributed": "red",
}  # fmt: skip
VERDICTS = {
    "faster": "green", "slower": "red", "error": "red", "warning": "yellow",
    "right": "green", "wrong": "red", "doubtful": "yellow",
}  # fmt: skip
NARROW, MIDDLE = 64, 84
MOST_CELL = 2000
LABEL = 10


def verdict_line(sentence: object, word: str = "") -> Text:
    """The first line of every report: the verdict in plain words."""
    return Text(inert(sentence, 500), style=f"bold {VERDICTS.get(word, '')}".strip())


def heading(text: object) -> Text:
    """A section's title, with a blank line before it."""
    return Text(f"\n{inert(text, 400)}", style="bold")


def remark(text: object, limit: int = 400) -> Text:
    """A line of plain text."""
    return Text(inert(text, limit))


def command_line(text: object, limit: int = 8000) -> Text:
    """A command to copy: never broken over lines, however long."""
    return Text(inert(text, limit), no_wrap=True)


def bar(label: str, shares: Iterable[tuple[str, float]], cells: int, after: str = "") -> Text:
    """One bar of ``cells`` columns: ``shares`` are (phase, part of the full width, 0 to 1), laid end to end."""
    text = Text(f"{inert(label):<{LABEL}}|")
    done = 0.0
    for name, share in shares:
        begin, done = round(done * cells), min(1.0, done + max(share, 0.0))
        text.append(_letter(name) * (round(done * cells) - begin), style=COLOURS.get(name, ""))
    text.append("|" + inert(after))
    return text


def _letter(name: str) -> str:
    return LETTERS.get(name, inert(name[:1]))


def legend(shares: Iterable[tuple[str, float]]) -> Text:
    """What the letters of a bar mean, with shares in percent; parts below 0.05 % are left out."""
    shown = [(name, share) for name, share in shares if share >= 0.0005]
    return Text("  ").join(
        Text(f"{_letter(name)}={inert(name, 20)} {100 * share:.1f} %", style=COLOURS.get(name, ""))
        for name, share in shown
    )


class InertTable(Table):
    """A table whose cells are made inert as they go in; those longer than MOST_CELL characters are cut."""

    def add_row(
        self, *renderables: RenderableType | None, style: StyleType | None = None, end_section: bool = False
    ) -> None:
        """As rich's, of inert cells."""
        cells = (inert(cell, MOST_CELL) if isinstance(cell, str) else cell for cell in renderables)
        super().add_row(*cells, style=style, end_section=end_section)


def make_table(columns: Sequence[str], left: Iterable[int] = (0,)) -> Table:
    """A table without lines: the columns in ``left`` stand left, numbers stand right and are never cut."""
    table = InertTable(box=None, pad_edge=False, header_style="dim")
    at_left = set(left)
    for i, name in enumerate(inert(name, MOST_CELL) for name in columns):
        flush = i in at_left
        table.add_column(name, justify="left" if flush else "right", no_wrap=not flush, overflow="fold")
    return table


def strip(share: float | None, cells: int = 20) -> str:
    """A small bar of ``#`` for a share of 1."""
    return "" if share is None else "#" * round(max(0.0, min(1.0, share)) * cells)
