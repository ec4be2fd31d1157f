"""A link of another host as a folder here: its plan, its processes' reports, and rings filled as records come.

Everything that reads a link here reads a mirror as it is. A ring here begins with the first record that was shipped.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.control.link import Link, write_private
from specmeter.hosts.far_rings import unpack, unpacked
from specmeter.hosts.frames import Message
from specmeter.hosts.shapes import sent
from specmeter.runtime import layout
from specmeter.runtime.ring import DEFAULT_CAPACITY, start_ticks
from specmeter.trace.ring import RECORD_DTYPE, Records

# Kinds whose t1 is a moment of the host's clock, and those whose t0 is one.
_T0 = (layout.KIND_HOST_SPAN, layout.KIND_MARK, layout.KIND_CLOCK_PAIR, layout.KIND_DISARMED, layout.KIND_COLLECTIVE)
_T1 = (layout.KIND_HOST_SPAN, layout.KIND_MARK, layout.KIND_VALUE, layout.KIND_COLLECTIVE)
_CLOCK, _CALENDAR = 11, 12  # places of perf_counter_ns and time_ns in the header
# What a far host may have kept here: processes of a link, a report's bytes, records a ring (512 MiB).
_MOST_PROCESSES, _MOST_REPORT, _MOST_RECORDS = 4096, 1 << 24, 1 << 24
_MOST_DEEP = 1 << 30  # bytes of a deep window's file


@dataclass(frozen=True)
class Shift:
    """From a host's clock to another one: ``by_ns`` is added; ``unix_ns`` is that one's time_ns - perf_counter_ns."""

    by_ns: int
    unix_ns: int


@dataclass(frozen=True)
class FarLink(Link):
    """A link of another host: ``path`` is its mirror here, ``far_id`` and ``far_path`` what it is there."""

    far_id: str = ""
    far_path: str = ""
    lives_there: dict[tuple[int, int], bool] = field(default_factory=dict, compare=False, repr=False)
    lost_there: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def lost(self) -> int:
        """Records that were overwritten there before they came, beyond the one that each gap here stands for."""
        return sum(self.lost_there.values())

    def lives(self, pid: int, start: int) -> bool:
        """As that host said last."""
        return self.lives_there.get((pid, start), False)


class Mirror:
    """Fills the folder of one far link from ``process``, ``ring`` and ``records`` events.

    ``shift`` puts every moment on another host's clock. ``prefix`` keeps the names of several hosts' rings
    apart; a mirror made with ``beside`` shares that one's folder. ``name`` is the link's id here, if not its own.
    """

    def __init__(
        self,
        described: Mapping[str, Any],
        shift: Shift | None = None,
        prefix: str = "",
        beside: Mirror | None = None,
        name: str | None = None,
    ) -> None:
        self._shift = shift
        self.plan: dict[str, Any] = described["plan"]
        self._prefix = prefix
        self._rings: dict[str, _RingCopy] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._own = beside is None
        far_id = str(described["link"])
        self._most = _most_records(described["document"])
        try:
            texts = [json.dumps(described[key]).encode() for key in ("plan", "document")]
        except RecursionError:
            raise sent(f"a plan of link {far_id} that is nested too deeply") from None
        folder = _new_folder() if beside is None else beside.link.path
        self.link: FarLink = FarLink(name or far_id, folder, far_id, str(described["path"]))
        if self._own:
            write_private(folder / "plan.json", texts[0])
            write_private(folder / "link.json", texts[1])

    @property
    def folder(self) -> Path:
        """Where it is kept (0700)."""
        return self.link.path

    def take(self, message: Message, payload: bytes) -> None:
        """One event of this link. Raises SpecmeterError for names and records that no runtime could have made.

        OSError where there is no room for it.
        """
        pid, start = _checked_name(str(message["name"]))
        name = f"{self._prefix}{pid}-{start}"
        with self._lock:
            if self._closed:
                return
            if message["event"] == "process":
                self.link.lives_there[pid, start] = bool(message["alive"])
                if len(self.link.lives_there) > _MOST_PROCESSES:
                    raise sent(f"more than {_MOST_PROCESSES} processes of link {self.link.far_id}")
                if _is_report(payload):
                    write_private(self.folder / f"{name}.json", payload)
            elif message["event"] == "ring":
                if name in self._rings or len(self._rings) >= _MOST_PROCESSES:
                    raise sent(f"the ring of process {pid} once more, or too many rings")
                self._rings[name] = _RingCopy(self.folder / f"{name}.ring", payload, self._shift, self._most)
            else:
                self._add(name, payload, int(message["lost"]))

    def _add(self, name: str, payload: bytes, lost: int) -> None:
        ring = self._rings.get(name)
        if ring is None:
            raise sent(f"records of {name} before its ring")
        try:
            records = unpack(payload)
        except ValueError as error:
            raise sent(f"damaged records of {name}", f"{error}.") from None
        gap = lost > 0 and ring.begun
        ring.add(records, gap)
        self.link.lost_there[name] = self.link.lost_there.get(name, 0) + lost - gap

    def keep_deep(self, pid: int, start: int, number: int, part: str, packed: bytes) -> None:
        """Keep one file of a deep window. Raises ValueError for one that is damaged, or longer than any window's."""
        folder = self.folder / "deep"
        folder.mkdir(mode=0o700, exist_ok=True)
        end = ".meta.json" if part == "meta" else ".json"
        write_private(folder / f"{pid}-{start}-{number}{end}", unpacked(packed, _MOST_DEEP))

    def close(self) -> None:
        """Remove the folder."""
        with self._lock:
            self._closed = True
            for ring in self._rings.values():
                ring.close()
            if self._own:
                shutil.rmtree(self.folder, ignore_errors=True)


class _RingCopy:
    """A ring file (0600) to which shipped records are written; what was not shipped takes no room on the disk."""

    def __init__(self, path: Path, header: bytes, shift: Shift | None, most: int) -> None:
        if len(header) != layout.HEADER.size or not header.startswith(layout.MAGIC):
            raise sent(f"a damaged ring, {path.stem}", "It has no ring header.")
        fields = list(layout.HEADER.unpack(header))
        self.capacity = int(fields[3])
        if fields[1] != layout.LAYOUT_VERSION or fields[2] != layout.RECORD_SIZE:
            raise sent(f"a damaged ring, {path.stem}", "Its layout is not known here.")
        if not 1 <= self.capacity <= most:
            raise sent(
                f"a ring of {self.capacity} records", f"Its link allows {most}, and --on {_MOST_RECORDS} (--records)."
            )
        if shift is not None:
            fields[_CLOCK] += shift.by_ns
            # Hosts' calendars differ by more than their clocks were compared to: one of them counts.
            fields[_CALENDAR] = fields[_CLOCK] + shift.unix_ns
        try:
            raw = layout.HEADER.pack(*fields)
        except struct.error:
            raise sent(f"a damaged ring, {path.stem}", "Its clock is out of range.") from None
        self._shift = shift
        self._position = 0
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._handle, layout.HEADER_SIZE + self.capacity * layout.RECORD_SIZE)
        os.pwrite(self._handle, raw, 0)

    @property
    def begun(self) -> bool:
        """Whether it has had records."""
        return self._position > 0

    def add(self, data: bytes, gap: bool) -> None:
        """Append records in the order of writing; a gap before them becomes a slot that is not complete."""
        records: Records = np.frombuffer(data, RECORD_DTYPE).copy()
        if self._shift is not None:
            add_to_moments(records, self._shift.by_ns)
        self._position += int(gap)
        positions = self._position + np.arange(len(records), dtype=np.int64)
        records["seq"] = (positions + 1).astype(np.uint32)
        raw, at = records.tobytes(), self._position % self.capacity
        first = min(len(records), self.capacity - at) * layout.RECORD_SIZE
        os.pwrite(self._handle, raw[:first], layout.HEADER_SIZE + at * layout.RECORD_SIZE)
        if first < len(raw):
            os.pwrite(self._handle, raw[first:], layout.HEADER_SIZE)
        self._position += len(records)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def add_to_moments(records: Records, by_ns: int) -> None:
    """Add ``by_ns`` to every moment of the host's clock, in place; device times and counts stay."""
    kind = records["kind"]
    records["t0"][np.isin(kind, _T0)] += by_ns
    records["t1"][np.isin(kind, _T1)] += by_ns


def _checked_name(name: str) -> tuple[int, int]:
    """PID and start of a process's name. Nothing else may become a file name here."""
    pid, _, start = name.partition("-")
    if not (pid.isascii() and pid.isdigit() and start.isascii() and start.isdigit() and len(name) < 64):
        raise sent(f"a process with the name {name[:40]!r}")
    return int(pid), int(start)


def _is_report(payload: bytes) -> bool:
    """Whether it is a process's report; one that is written at the moment may be no JSON."""
    if len(payload) > _MOST_REPORT:
        raise sent(f"a process's report of {len(payload)} bytes")
    try:
        return isinstance(json.loads(payload), dict)
    except (ValueError, RecursionError):
        return False


def _most_records(document: Mapping[str, Any]) -> int:
    """How many records a ring of the link has at most: as its maker said, and within what is taken at all."""
    stated = document.get("capacity")
    wanted = stated if isinstance(stated, int) and stated > 0 else 0
    return max(DEFAULT_CAPACITY, min(1 << max(wanted - 1, 1).bit_length(), _MOST_RECORDS))


def _new_folder() -> Path:
    """A private folder that names its process; those of processes that were killed go."""
    for path in Path(tempfile.gettempdir()).glob("specmeter-mirror-*"):
        pid, start = [*path.name.split("-"), "", ""][2:4]
        try:
            info = path.lstat()
        except OSError:
            continue  # another one was quicker
        owned = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
        if owned and pid.isdigit() and start.isdigit() and start_ticks(int(pid)) != int(start):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"specmeter-mirror-{os.getpid()}-{start_ticks(os.getpid())}-"))
