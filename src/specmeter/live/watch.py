"""All links of this user, or one, watched together; links that come and go are noticed."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Protocol

from specmeter.control.link import Link, links
from specmeter.control.processes import arm, disarm
from specmeter.errors import SpecmeterError
from specmeter.exports.figures import Figures
from specmeter.live.server import LiveServer

_LINKS_S = 2.0


class Links(Protocol):
    """Where links are, and how their processes are told."""

    def list(self) -> list[Link]:
        """The links that are there now. Raises SpecmeterError."""
        ...

    def arm(self, link: Link, timeout_s: float) -> tuple[int, int]:
        """Put the probes in; gives how many processes did and how many did not answer."""
        ...

    def disarm(self, link: Link, timeout_s: float) -> tuple[int, int]:
        """Take them out."""
        ...

    def lost(self, link: Link) -> int:
        """Records that never came to where they are read."""
        ...


class LinksHere:
    """The links of this user on this machine, or the one that was chosen."""

    def __init__(self, chosen: Link | None = None) -> None:
        self._chosen = chosen

    def list(self) -> list[Link]:
        """Oldest first."""
        return [self._chosen] if self._chosen else links()

    def arm(self, link: Link, timeout_s: float) -> tuple[int, int]:
        """Arm, to stay."""
        ack = arm(link, timeout_s)
        return len(ack.done), len(ack.silent)

    def disarm(self, link: Link, timeout_s: float) -> tuple[int, int]:
        """Disarm."""
        ack = disarm(link, timeout_s)
        return len(ack.done), len(ack.silent)

    def lost(self, link: Link) -> int:
        """None: rings are read where they are written."""
        return 0


class Watch:
    """``servers`` by link id. ``note`` is the last thing that went wrong, empty when nothing did.

    ``held``: the figures begin with what the rings hold already. Those of a link that comes later do in any case.
    """

    def __init__(self, where: Links, histograms: bool = False, held: bool = False) -> None:
        self.servers: dict[str, LiveServer] = {}
        self.note = ""
        self.where = where
        self._histograms = histograms
        self._held = held
        self._listed = -_LINKS_S
        self._seen = False
        self._lock = threading.Lock()

    def poll(self) -> None:
        """Read what is new in every ring."""
        with self._lock:
            now = time.monotonic()
            if now - self._listed >= _LINKS_S:
                self._listed = now
                self._list()
            for server in self.servers.values():
                server.poll()

    def figures(self) -> list[Figures]:
        """The figures of every rank of every server; may be called from another thread."""
        with self._lock:
            return [figures for server in self.servers.values() for figures in server.figures()]

    def _list(self) -> None:
        try:
            found = self.where.list()
        except (SpecmeterError, OSError) as error:
            self.note = str(error).splitlines()[0]
            return
        there = [link for link in found if link.path.exists()]
        for link in there:
            if link.id not in self.servers:
                # One that came since the last listing was not watched before that.
                since = time.perf_counter() - _LINKS_S if self._seen and not self._held else None
                held, missed = self._held or self._seen, partial(self.where.lost, link)
                try:
                    self.servers[link.id] = LiveServer(link, self._histograms, held, since_s=since, missed=missed)
                except SpecmeterError as error:
                    self.note = f"{link.id}: {error.what}"
        for gone in self.servers.keys() - {link.id for link in there}:
            del self.servers[gone]
        self._seen = True
