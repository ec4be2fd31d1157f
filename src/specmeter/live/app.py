"""``specmeter top`` on a terminal, by Textual: one widget that draws only the lines that changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from specmeter.control.link import Link
from specmeter.errors import SpecmeterError
from specmeter.live.server import LiveServer, beat
from specmeter.live.view import Line, Shown, legend, server_lines
from specmeter.live.watch import Links, Watch
from specmeter.reporters.inert import inert

KEYS = "a arm  d disarm  up/down choose  space freeze  q quit"


class Board(ScrollView, can_focus=False):
    """The lines of all servers."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._strips: dict[int, Strip] = {}

    def show(self, lines: list[Line]) -> None:
        """Draw ``lines``; those that stay as they are cost nothing."""
        if len(lines) != len(self._lines):
            self._lines, self._strips = lines, {}
            self.virtual_size = Size(self.size.width, len(lines))
            self.refresh()
            return
        top = self.scroll_offset.y
        changed = [y for y, line in enumerate(lines) if line != self._lines[y]]
        self._lines = lines
        for y in changed:
            self._strips.pop(y, None)
        if changed:
            self.refresh(*(Region(0, y - top, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        """One line of the screen."""
        at = y + self.scroll_offset.y
        if at >= len(self._lines):
            return Strip.blank(self.size.width)
        if at not in self._strips:
            segments = [Segment(text, Style.parse(style)) for text, style in self._lines[at]]
            self._strips[at] = Strip(segments).adjust_cell_length(self.size.width)
        return self._strips[at]

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines of a region. The board has no border, padding or margin to be drawn, which Textual looks for."""
        filters, background = self.get_line_filters(), self.background_colors[1]
        strips = []
        for y in crop.line_range:
            strip = self.render_line(y)
            for one in filters:
                strip = strip.apply_filter(one, background)
            strips.append(strip.crop_extend(crop.x, crop.right, None))
        return strips


class Top(App[None]):
    """Every link of this user, or the ``chosen`` one. Reads rings only; the keys a and d are the sole commands."""

    CSS = "Screen { background: ansi_default; } Board { height: 1fr; } Static { height: 1; } #legend { height: auto; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "arm(True)", "arm"),
        Binding("d", "arm(False)", "disarm"),
        Binding("up,k", "choose(-1)", "up"),
        Binding("down,j", "choose(1)", "down"),
        Binding("space", "freeze", "freeze"),
        Binding("q,ctrl+c", "quit", "quit"),
    ]

    def __init__(self, where: Links, rate_hz: float, shown: Shown) -> None:
        super().__init__(ansi_color=True)
        self.watch_ = Watch(where)
        self.at = 0
        self.frozen = False
        self.note = ""
        self.answer_s = 10.0
        self._drawn: tuple[object, ...] = ()
        self._rate_hz = rate_hz
        self._shown = shown

    @property
    def servers(self) -> dict[str, LiveServer]:
        """The servers by link id."""
        return self.watch_.servers

    def compose(self) -> ComposeResult:
        """The board, the legend of the chosen server, and the keys."""
        yield Board()
        yield Static("", id="legend", markup=False)
        yield Static(KEYS, id="status", markup=False)

    def on_mount(self) -> None:
        """Start to look."""
        self.set_interval(1 / self._rate_hz, self.tick)
        self.tick()

    def tick(self) -> None:
        """Read what is new, and draw what changed."""
        self.watch_.poll()
        self.at = max(0, min(self.at, len(self.servers) - 1))
        state = (beat(time.perf_counter()), self.size, self.note, self.watch_.note, *self._versions())
        if not self.frozen and state != self._drawn:
            self._drawn = state
            self._draw()

    def _versions(self) -> list[object]:
        return [item for id, server in self.servers.items() for item in (id, server.version, server.fault, server.lost)]

    def _draw(self) -> None:
        second = beat(time.perf_counter())
        shown = replace(self._shown, width=max(40, self.size.width))
        lines: list[Line] = []
        for number, server in enumerate(self.servers.values()):
            lines += server_lines(server, second, shown, number == self.at)
        if not lines:
            lines = [[("No server: start one with `specmeter run -- CMD`.", "dim")]]
        self.query_one(Board).show(lines)
        self._say("legend", self._legend(second))
        self._say(
            "status",
            KEYS
            + ("  FROZEN" if self.frozen else "")
            + (f"  {inert(self.note or self.watch_.note, 100)}" if self.note or self.watch_.note else ""),
        )

    def _say(self, id: str, text: str) -> None:
        widget = self.query_one(f"#{id}", Static)
        if widget.content != text:
            widget.update(text)

    def _legend(self, second: int) -> str:
        server = self._server()
        for key in sorted(server.ranks) if server else ():
            assert server is not None
            return legend(server.ranks[key].stats.recent(second, self._shown.seconds), self.size.width)
        return ""

    def _server(self) -> LiveServer | None:
        servers = list(self.servers.values())
        return servers[self.at] if servers else None

    def action_choose(self, by: int) -> None:
        """Choose the server that the keys act on."""
        self.at = max(0, min(self.at + by, len(self.servers) - 1))
        self._draw()

    def action_freeze(self) -> None:
        """Stop drawing, or go on; rings are read all the same."""
        self.frozen = not self.frozen
        self._draw()

    def action_arm(self, wanted: bool) -> None:
        """Arm or disarm the chosen server."""
        server = self._server()
        if server is not None:
            self.note = f"{'arming' if wanted else 'disarming'} {server.link.id}"
            where = self.watch_.where
            self._tell(where.arm if wanted else where.disarm, server, "armed" if wanted else "disarmed")

    @work(thread=True, exclusive=True)
    def _tell(self, command: Callable[[Link, float], tuple[int, int]], server: LiveServer, word: str) -> None:
        """Send the command and wait for the answers, beside the drawing."""
        try:
            done, silent = command(server.link, self.answer_s)
        except (SpecmeterError, OSError) as error:
            self.note = f"{server.link.id}: {error}".splitlines()[0]
            return
        self.note = f"{server.link.id}: {done} {word}" + (f", {silent} silent" if silent else "")
        self.call_from_thread(server.look)
