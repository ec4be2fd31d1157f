"""A link whose ring grows under the test's hand, record by record, as a server's would."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmeter.control import Link, make_link
from specmeter.runtime import layout
from specmeter.runtime.ring import start_ticks
from specmeter.trace.synthetic import make_records, write_ring


class GrowingRing:
    """One process of a link: this one. ``add`` completes records in order; ``hole`` takes a slot and leaves it."""

    def __init__(self, base: Path, plan: dict[str, Any], link_id: str = "grow", capacity: int = 4096) -> None:
        base.mkdir(mode=0o700, exist_ok=True)
        base.chmod(0o700)
        self.link: Link = make_link(plan, {}, base=base, link_id=link_id)
        self.pid = os.getpid()
        self.stem = f"{self.pid}-{start_ticks(self.pid)}"
        self.path = self.link.path / f"{self.stem}.ring"
        self.capacity = capacity
        self.written = 0
        self.report(armed=True)
        write_ring(self.path, make_records([]), capacity, pid=self.pid)

    def report(self, **facts: Any) -> None:
        """Write what the process says about itself."""
        known = {"pid": self.pid, "armed": True, "generation": 0, "refused": [], "disarmed": [], **facts}
        (self.link.path / f"{self.stem}.json").write_text(json.dumps(known))

    def add(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Complete one record for each row (t0, t1, cycle, point, kind, lane, value)."""
        with self.path.open("r+b") as file:
            for row in rows:
                file.seek(layout.HEADER_SIZE + self.written % self.capacity * layout.RECORD_SIZE)
                self.written += 1
                file.write(layout.RECORD.pack(*row, self.written & 0xFFFFFFFF))

    def hole(self) -> None:
        """A slot whose thread was killed before it completed the record."""
        self.written += 1
