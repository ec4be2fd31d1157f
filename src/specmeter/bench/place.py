"""Where a server runs: on this machine, or behind ``--on`` (hosts.place). What a session asks of either."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specmeter import control
from specmeter.bench import machine
from specmeter.bench.client import Api, Call
from specmeter.bench.load import Load, LoadResult, OnDone, drive
from specmeter.control.deep import DeepAsked, deep_window
from specmeter.control.prepare import prepare_link
from specmeter.engines import Engine, Server, ServerSpec
from specmeter.engines.server import Progress
from specmeter.errors import Exit, SpecmeterError


class Place(Protocol):
    """A machine with servers. Paths of interpreters, recipes and programs are that machine's."""

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts as ``--on`` named them, none for this machine."""
        ...

    def prepare(
        self,
        spec: ServerSpec,
        engine: str | None,
        python: Path | None,
        recipe: Path | None,
        device: str | None = None,
    ) -> control.Link:
        """Plan for the command of ``spec`` and make a link. Raises SpecmeterError with the reason if it cannot be."""
        ...

    def find_link(self, name: str | None) -> control.Link:
        """An existing link. Raises SpecmeterError."""
        ...

    def remove_link(self, link: control.Link) -> None:
        """Remove a link that ``prepare`` made, or what was kept here of one that was found."""
        ...

    def start(
        self,
        engine: Engine,
        spec: ServerSpec,
        log_path: Path,
        link: control.Link | None,
        progress: Progress,
        timeout_s: float | None,
    ) -> Server:
        """Start the command of ``spec`` and wait until it is healthy, as ``Server.start`` does."""
        ...

    def server_at(self, url: str, engine: Engine | None = None) -> Server:
        """The running server at ``url``, an address of that machine."""
        ...

    def wait_for_processes(self, link: control.Link, count: int, timeout_s: float) -> None:
        """Wait until so many processes of the link have come up. Raises SpecmeterError after ``timeout_s``."""
        ...

    def arm(
        self,
        link: control.Link,
        timeout_s: float,
        watchdog_s: float,
        sampling: control.Sampling | None = None,
        nvtx: bool | None = None,
    ) -> Sequence[int]:
        """Put the probes in, as ``control.arm`` does; gives the pids of processes that did not answer."""
        ...

    def beat(self, link: control.Link) -> None:
        """Tell the link's processes that somebody is there."""
        ...

    def disarm(self, link: control.Link, timeout_s: float) -> None:
        """Take the probes out."""
        ...

    def deep(self, link: control.Link, cycles: int, label: str, deadline_s: float) -> DeepAsked:
        """While armed and requests run: a deep window, whose files lie below ``link.path`` here afterwards.

        Raises SpecmeterError as ``control.deep.deep_window`` does.
        """
        ...

    def collect(self, link: control.Link) -> None:
        """See to it that everything that the link's rings hold can be read below ``link.path`` here."""
        ...

    def drive(
        self, base_url: str, model: str, calls: Sequence[Call], load: Load, api: Api, on_done: OnDone
    ) -> LoadResult:
        """Send the calls from that machine and wait; times are its perf_counter_ns."""
        ...

    def busy_warning(self) -> str | None:
        """A sentence for the user if something else computes on that machine."""
        ...

    def variables(self, pid: int, names: Sequence[str]) -> Mapping[str, str]:
        """The values of environment variables in the youngest process of the server ``pid`` that has them."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the run keeps of it in run.json."""
        ...

    def notes(self) -> list[str]:
        """What the reader of the report has to know of it."""
        ...


class Here:
    """This machine."""

    names: tuple[str, ...] = ()

    def prepare(
        self,
        spec: ServerSpec,
        engine: str | None,
        python: Path | None,
        recipe: Path | None,
        device: str | None = None,
    ) -> control.Link:
        """Plan here."""
        reason = control.why_not_up(spec.command)
        if reason:
            what, step = "The probes cannot get into this server.", "Leave the option out."
            raise SpecmeterError(what, reason, step, Exit.REFUSED)
        return prepare_link(
            list(spec.command), engine=engine, python=python, recipe=recipe,
            device_events=device is not None, device_stamps=device == "stamps",
        )  # fmt: skip

    def find_link(self, name: str | None) -> control.Link:
        """A link of this user."""
        return control.find_link(name)

    def remove_link(self, link: control.Link) -> None:
        """Delete its folder."""
        control.remove_link(link)

    def start(
        self,
        engine: Engine,
        spec: ServerSpec,
        log_path: Path,
        link: control.Link | None,
        progress: Progress,
        timeout_s: float | None,
    ) -> Server:
        """Start it here."""
        extra: dict[str, str] = {}
        if link is not None:
            whole = control.launch_env(link, {**os.environ, **spec.env})
            extra = {key: whole[key] for key in ("SPECMETER_LINK", "PYTHONPATH")}
        return Server.start(engine, spec, log_path, extra_env=extra, progress=progress, timeout_s=timeout_s)

    def server_at(self, url: str, engine: Engine | None = None) -> Server:
        """As this machine reaches it."""
        return Server(url, engine)

    def wait_for_processes(self, link: control.Link, count: int, timeout_s: float) -> None:
        """Look at the link's folder."""
        control.wait_for_processes(link, count, timeout_s)

    def arm(
        self,
        link: control.Link,
        timeout_s: float,
        watchdog_s: float,
        sampling: control.Sampling | None = None,
        nvtx: bool | None = None,
    ) -> Sequence[int]:
        """Become the link's controller and arm."""
        ack = control.arm(link, timeout_s, watchdog_s, sampling=sampling, nvtx=nvtx)
        return [process.pid for process in ack.silent]

    def beat(self, link: control.Link) -> None:
        """Through their control lines."""
        control.beat(link)

    def disarm(self, link: control.Link, timeout_s: float) -> None:
        """Disarm and give the link up."""
        control.disarm(link, timeout_s)

    def deep(self, link: control.Link, cycles: int, label: str, deadline_s: float) -> DeepAsked:
        """Ask its processes."""
        return deep_window(link, cycles, label, deadline_s)

    def collect(self, link: control.Link) -> None:
        """They are here already."""

    def drive(
        self, base_url: str, model: str, calls: Sequence[Call], load: Load, api: Api, on_done: OnDone
    ) -> LoadResult:
        """From this process."""
        return drive(base_url, model, calls, load, api, on_done)

    def busy_warning(self) -> str | None:
        """From /proc/stat."""
        return machine.busy_warning()

    def variables(self, pid: int, names: Sequence[str]) -> Mapping[str, str]:
        """From /proc."""
        from specmeter.engines.guardian import descendants

        found: dict[str, str] = {}
        for process in (pid, *descendants(pid)) if names else ():
            with contextlib.suppress(OSError):
                found |= dict(_named(process, names))
        return found

    def facts(self) -> dict[str, Any]:
        """Nothing beyond what every run keeps."""
        return {}

    def notes(self) -> list[str]:
        """Nothing."""
        return []


def _named(pid: int, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals and name in names:
            yield name, value


HERE = Here()
