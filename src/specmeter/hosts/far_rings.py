"""Ships what is new in the rings of links: only new records, packed, within a byte rate. Standard library of 3.9."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specmeter.control.link import Link
from specmeter.control.processes import processes
from specmeter.control.records import PIECE, NewRecords
from specmeter.runtime import layout

TICK_S = 0.5
LOOK_S = 1.0
# What live reading may use of the link, in bytes a second; the rest of the budget of 100 kB/s is for the answers.
RATE = 80_000.0
_BURST_S = 1.0
Send = Callable[[dict[str, Any], bytes], None]


def pack(records: bytes) -> bytes:
    """Whole records, packed: byte by byte of the record, so that what hardly changes stands together."""
    size = layout.RECORD_SIZE
    return zlib.compress(b"".join(records[place::size] for place in range(size)))


def unpack(data: bytes) -> bytes:
    """The inverse of ``pack``, of a piece at most. Raises ValueError."""
    size = layout.RECORD_SIZE
    plain = unpacked(data, PIECE * size)
    if len(plain) % size:
        raise ValueError("It holds no whole records")
    count = len(plain) // size
    out = bytearray(len(plain))
    for place in range(size):
        out[place::size] = plain[place * count : (place + 1) * count]
    return bytes(out)


def unpacked(data: bytes, most: int) -> bytes:
    """What zlib packed. Raises ValueError, also for more than ``most`` bytes: a few can stand for gigabytes."""
    packed = zlib.decompressobj()
    try:
        plain = packed.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"It cannot be unpacked: {error}") from None
    if len(plain) > most:
        raise ValueError(f"It is longer than {most} bytes")
    if not packed.eof:
        raise ValueError("It has no end")
    return plain


class Shipper:
    """Sends the news of the links given to ``watch``: ``process`` events (reports) and ``records`` events.

    One thread ships within RATE; ``collect`` ships all that is left of one link, without that limit.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._links: dict[str, Link] = {}
        self._rings: dict[tuple[str, str], NewRecords] = {}
        self._said: dict[tuple[str, str], tuple[bytes, bool]] = {}
        self._from_start: set[str] = set()
        self._lost: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._allowed = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, link: Link) -> None:
        """Ship this link's news from now on: of rings that are there already what comes, of later ones everything."""
        with self._lock:
            self._links[link.id] = link
            self._look(link)
            self._from_start.add(link.id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def forget(self, link_id: str) -> None:
        """Ship nothing more of this link."""
        with self._lock:
            self._links.pop(link_id, None)
            self._from_start.discard(link_id)
            for key in [key for key in self._rings if key[0] == link_id]:
                self._rings.pop(key).close()
            # One that is watched again is new to who watches it.
            for known in (self._said, self._lost):
                for key in [key for key in known if key[0] == link_id]:
                    del known[key]

    def collect(self, link_id: str) -> int:
        """Ship everything that the link's rings still hold; gives how many records were lost in all."""
        with self._lock:
            link = self._links.get(link_id)
            if link is None:
                return 0
            self._look(link)
            for key, ring in self._rings.items():
                if key[0] == link_id:
                    while self._ship(key, ring, last=True):
                        pass
            return sum(ring.lost for key, ring in self._rings.items() if key[0] == link_id)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        looked = 0.0
        while not self._ended.wait(TICK_S):
            self._allowed = min(self._allowed + RATE * TICK_S, RATE * _BURST_S)
            with self._lock, contextlib.suppress(OSError, ValueError):
                if time.monotonic() - looked >= LOOK_S:
                    looked = time.monotonic()
                    for link in self._links.values():
                        self._look(link)
                moved = True
                while moved and self._allowed > 0:
                    moved = False
                    for key, ring in self._rings.items():
                        shipped = self._ship(key, ring) if self._allowed > 0 else 0
                        self._allowed -= shipped
                        moved = moved or shipped > 0

    def _look(self, link: Link) -> None:
        """See which processes and rings there are; send what their reports say, where that is new."""
        if not link.path.exists():
            return
        for process in processes(link):
            name = process.fifo.stem
            key = (link.id, name)
            with contextlib.suppress(OSError):
                report = (link.path / f"{name}.json").read_bytes()
                if self._said.get(key) != (report, process.alive):
                    self._said[key] = (report, process.alive)
                    self._send({"event": "process", "link": link.id, "name": name, "alive": process.alive}, report)
            if process.ring is not None and key not in self._rings:
                with contextlib.suppress(OSError, ValueError):
                    ring = NewRecords(Path(process.ring), link.id in self._from_start)
                    self._rings[key] = ring
                    self._send({"event": "ring", "link": link.id, "name": name}, ring.header)

    def _ship(self, key: tuple[str, str], ring: NewRecords, last: bool = False) -> int:
        """Send a piece of one ring; gives how many bytes that took, 0 when there was nothing."""
        records = ring.take(PIECE, pass_holes=last)
        if not records:
            return 0
        packed = pack(records)
        lost = ring.lost - self._lost.get(key, 0)
        self._lost[key] = ring.lost
        self._send({"event": "records", "link": key[0], "name": key[1], "lost": lost}, packed)
        return len(packed)
