"""Pieces of HTML. Everything from outside goes through ``text``: control characters replaced, then escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specmeter.reporters.inert import inert

LONGEST = 2000


def text(value: object, limit: int = LONGEST) -> str:
    """A value as inert, escaped text, at most ``limit`` characters before escaping."""
    return html.escape(inert(value, limit), quote=True)


def lines(value: str) -> str:
    """Text of several lines, each made inert and escaped."""
    return "\n".join(text(line) for line in value.splitlines())


def paragraph(value: object, css: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(css)}>{text(value)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str, left: Iterable[int] = (0,)) -> str:
    """A table with a caption; the first column holds row headers, columns outside ``left`` stand right."""
    flush = set(left)
    head = "".join(f'<th scope="col"{_side(i, flush)}>{text(name)}</th>' for i, name in enumerate(columns))
    body = "".join(_row(cells, flush) for cells in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table><caption>{text(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[object], flush: set[int]) -> str:
    first = f'<th scope="row"{_side(0, flush)}>{text(cells[0])}</th>'
    return "<tr>" + first + "".join(f"<td{_side(i, flush)}>{text(c)}</td>" for i, c in enumerate(cells) if i) + "</tr>"


def _side(column: int, flush: set[int]) -> str:
    return "" if column in flush else ' class="n"'


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


def figure(svg: str, title: str, note: str = "") -> str:
    """A chart with its title and, under it, what it shows. The chart takes the keyboard: arrow keys walk its marks."""
    below = f"<figcaption>{text(note)}</figcaption>" if note else ""
    return (
        f'<figure><h3>{text(title)}</h3><div class="chart" tabindex="0" role="group" aria-label="Chart: {text(title)}">'
        f"{svg}</div>{below}</figure>"
    )


def beside(*parts: str) -> str:
    """Parts next to each other where the window is wide, below each other where it is not."""
    return '<div class="pair">' + "".join(f"<div>{part}</div>" for part in parts if part) + "</div>"


def details(summary: str, inner: str) -> str:
    """A part that opens on request."""
    return f"<details><summary>{text(summary)}</summary>{inner}</details>"


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: (name, value, what stands below it)."""
    items = "".join(
        f'<div class="card" data-fact="{text(name)}"><dt>{text(name)}</dt><dd class="value">{text(value)}</dd>'
        f"<dd>{text(below)}</dd></div>"
        for name, value, below in facts
    )
    return f'<dl class="cards">{items}</dl>'


@dataclass
class Section:
    """A part of the page: title, anchor (all but letters, digits and ``-_.`` become ``-``), inner HTML that is safe.

    The anchor may be made of what a document holds.
    """

    title: str
    anchor: str
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.anchor = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.anchor)

    def add(self, *parts: str) -> Section:
        """Append parts; gives the section itself."""
        self.parts.extend(part for part in parts if part)
        return self

    def as_html(self) -> str:
        """The section's HTML."""
        inner = "\n".join(self.parts)
        return f'<section id="{self.anchor}"><h2>{text(self.title)}</h2>\n{inner}</section>'
