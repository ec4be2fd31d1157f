"""Several hosts as one place, for a server that spans them: load on the first, probes on all, one clock.

A ring of another host than the first is put on the first one's clock as it comes in. How far off that can be is
known: half the shortest round trip to either host (NTP's bound), and what the clocks drifted while it ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter import control
from specmeter.bench.client import Api, Call
from specmeter.bench.load import Load, LoadResult, OnDone
from specmeter.control.deep import DeepAsked
from specmeter.engines import Engine, Server, ServerSpec
from specmeter.engines.server import Progress
from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.mirror import Shift
from specmeter.hosts.place import There
from specmeter.hosts.shapes import checked_plan


@dataclass
class Compared:
    """A host's clock against the first one's: ``by_ns`` is added to its moments, wrong by at most ``error_ns``."""

    place: There
    by_ns: int
    error_ns: int


class Joined:
    """The hosts of one multi-node server, the one that answers requests first. Its link has the same id on each."""

    def __init__(self, places: Sequence[There]) -> None:
        self._first, self._others = places[0], list(places[1:])
        self._all = list(places)
        self.clocks: list[Compared] = []

    @property
    def names(self) -> tuple[str, ...]:
        """All hosts."""
        return tuple(name for place in self._all for name in place.names)

    def facts(self) -> dict[str, Any]:
        """Every host, and how their clocks were joined."""
        entries = [entry for place in self._all for entry in place.facts()["on"]]
        for entry, clock in zip(entries[1:], self.clocks, strict=False):
            entry["clock"] = {"onto": self._first.names[0], "added_ns": clock.by_ns, "error_ns": clock.error_ns}
        return {"on": entries}

    def notes(self) -> list[str]:
        """How sure the joined clock is, and what got lost."""
        bounds = [
            f"moments of {c.place.names[0]} are on the clock of {self._first.names[0]}, off by at most "
            f"{c.error_ns / 1e6:.3f} ms"
            for c in self.clocks
        ]
        return bounds + [note for place in self._all for note in place.notes()]

    def prepare(
        self,
        spec: ServerSpec,
        engine: str | None,
        python: Path | None,
        recipe: Path | None,
        device: str | None = None,
    ) -> control.Link:
        """Refused: each host's command has a rank of its own."""
        raise SpecmeterError(
            f"One command cannot be started on {len(self._all)} hosts.",
            "Every node of a server has a command of its own, with its rank.",
            "Start each with `specmeter --on HOST run --link NAME -- CMD`, then profile them with --link NAME --url U.",
        )

    def find_link(self, name: str | None) -> control.Link:
        """The link of that id on every host, their rings side by side in one folder."""
        link = self._first.find_link(name)
        if self.clocks:
            return link
        mirror = self._first.mirrors[link.id]
        first = self._first.relay.clock()
        unix_ns = self._first.relay.unix_ns()
        for number, place in enumerate(self._others, 1):
            described, _ = place.relay.call("find", link=link.id)
            try:
                checked_plan(described)
            except SpecmeterError as error:
                raise place.relay.named(error) from None
            if _points(described["plan"]) != _points(mirror.plan):
                raise SpecmeterError(
                    f"Link {link.id} measures other points on {place.names[0]} than on {self._first.names[0]}.",
                    "Different releases of the engine, or different recipes, run there.",
                    "Bring all nodes to one release.",
                    Exit.REFUSED,
                )
            theirs = place.relay.clock()
            compared = Compared(place, first.offset_ns - theirs.offset_ns, first.error_ns + theirs.error_ns)
            place.mirror(described, Shift(compared.by_ns, unix_ns), f"host{number}-", mirror)
            self.clocks.append(compared)
        return link

    def remove_link(self, link: control.Link) -> None:
        """On every host."""
        for place in reversed(self._all):
            place.remove_link(link)

    def start(
        self,
        engine: Engine,
        spec: ServerSpec,
        log_path: Path,
        link: control.Link | None,
        progress: Progress,
        timeout_s: float | None,
    ) -> Server:
        """Refused, as ``prepare``."""
        self.prepare(spec, None, None, None)
        raise AssertionError

    def server_at(self, url: str, engine: Engine | None = None) -> Server:
        """As the first host reaches it."""
        return self._first.server_at(url, engine)

    def wait_for_processes(self, link: control.Link, count: int, timeout_s: float) -> None:
        """So many on every host."""
        for place in self._all:
            place.wait_for_processes(link, count, timeout_s)

    def arm(
        self,
        link: control.Link,
        timeout_s: float,
        watchdog_s: float,
        sampling: control.Sampling | None = None,
        nvtx: bool | None = None,
    ) -> Sequence[int]:
        """On every host, the first one last: its requests come after."""
        silent: list[int] = []
        for place in reversed(self._all):
            silent += place.arm(link, timeout_s, watchdog_s, sampling, nvtx)
        return silent

    def beat(self, link: control.Link) -> None:
        """To every host."""
        for place in self._all:
            place.beat(link)

    def disarm(self, link: control.Link, timeout_s: float) -> None:
        """On every host, whichever fails."""
        failed: SpecmeterError | None = None
        for place in self._all:
            try:
                place.disarm(link, timeout_s)
            except SpecmeterError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def deep(self, link: control.Link, cycles: int, label: str, deadline_s: float) -> DeepAsked:
        """Refused: a window's times would have to be put on the first host's clock."""
        raise SpecmeterError(
            "There is no deep window of several hosts at once.",
            "The profiler's times of one host are not put on another one's clock.",
            "Run `specmeter profile --deep --on HOST` for each of them.",
            Exit.REFUSED,
        )

    def collect(self, link: control.Link) -> None:
        """From every host; then the clocks are compared once more, so that drift is part of the bound."""
        for place in self._all:
            place.collect(link)
        first = self._first.relay.clock()
        for compared in self.clocks:
            theirs = compared.place.relay.clock()
            drifted = abs(first.offset_ns - theirs.offset_ns - compared.by_ns)
            compared.error_ns = max(compared.error_ns, drifted + first.error_ns + theirs.error_ns)

    def drive(
        self, base_url: str, model: str, calls: Sequence[Call], load: Load, api: Api, on_done: OnDone
    ) -> LoadResult:
        """From the first host."""
        return self._first.drive(base_url, model, calls, load, api, on_done)

    def busy_warning(self) -> str | None:
        """Of the first host that has one."""
        return next((warning for place in self._all if (warning := place.busy_warning())), None)

    def variables(self, pid: int, names: Sequence[str]) -> Mapping[str, str]:
        """Of the first host's server."""
        return self._first.variables(pid, names)


def _points(plan: Mapping[str, Any]) -> list[tuple[int, str]]:
    return [(int(point["id"]), str(point["name"])) for point in plan["points"]]
