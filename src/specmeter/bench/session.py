"""A server under our probes: planned, linked, started, armed for a while, and left clean whatever happens."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specmeter import control
from specmeter.bench.client import Api, Call, Outcome
from specmeter.bench.load import Load, LoadResult
from specmeter.bench.machine import busy_note
from specmeter.bench.place import HERE, Place
from specmeter.bench.progress import Progress
from specmeter.engines import Engine, Server, ServerSpec, engine_named, engine_of_metrics
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.rundir import RunWriter

WATCHDOG_S = 30.0
RECIPE_ENGINES = {"embedded": "specmeter"}
DEATH_S = 2.0


@dataclass
class Session:
    """A healthy server with its link (None: no probes), the name of the model it serves, and where it runs."""

    server: Server
    engine: Engine | None
    link: control.Link | None
    model: str
    progress: Progress
    place: Place = HERE

    @property
    def api(self) -> Api:
        """Every engine here answers chat completions."""
        return "chat"

    def drive(self, title: str, calls: Sequence[Call], load: Load | None = None, api: Api | None = None) -> LoadResult:
        """Send the calls with progress; a dead server is an error (exit 4) with its log's cause."""
        self.progress.start(title, len(calls))

        def done(outcome: Outcome) -> None:
            self.progress.step(outcome.call.setting)

        if self.server.headers:
            calls = [replace(each, headers=self.server.headers) for each in calls]
        result = self.place.drive(self.server.url, self.model, calls, load or Load(), api or self.api, done)
        self.progress.clear()
        if any(outcome.error for outcome in result.outcomes):
            self.check_death()
        return result

    def sample(self, sampling: control.Sampling) -> None:
        """While armed: have the probes in another share of the cycles from now on. Raises SpecmeterError as arming."""
        if self.link is not None:
            self._arm(sampling, None)

    def _arm(self, sampling: control.Sampling | None, nvtx: bool | None) -> None:
        assert self.link is not None
        silent = self.place.arm(self.link, 10.0, WATCHDOG_S, sampling, nvtx)
        if silent:
            raise SpecmeterError(
                "The probes could not be put in.",
                f"No answer from process {', '.join(map(str, silent))}.",
                f"specmeter status --link {self.link.id} says more.",
                Exit.SERVER_FAILED,
            )

    def check_death(self) -> None:
        """Raise if the server has ended; a broken connection comes a moment before the exit code."""
        deadline = time.monotonic() + DEATH_S
        while self.server.process is not None and time.monotonic() < deadline:
            self.server.check_alive()
            time.sleep(0.05)

    @contextlib.contextmanager
    def armed(self, sampling: control.Sampling | None = None, nvtx: bool | None = None) -> Iterator[None]:
        """Probes in while inside; out again at the end, when what they wrote can be read from ``link.path``.

        With ``sampling`` in some of the cycles, drawn at random; ``sample`` changes the share. ``nvtx``: spans also
        push NVTX ranges (None: as the link says). Raises SpecmeterError if a process does not answer.
        """
        if self.link is None:
            yield
            return
        link, place = self.link, self.place
        place.wait_for_processes(link, 1, 20.0)
        ended = threading.Event()
        beating = threading.Thread(target=_beat, args=(place, link, ended), daemon=True)
        try:
            self._arm(sampling, nvtx)
            beating.start()
            yield
        finally:
            ended.set()
            with contextlib.suppress(SpecmeterError):
                place.disarm(link, 5.0 if self.server.process is None or self.server.process.poll() is None else 0.1)
        place.collect(link)


def _beat(place: Place, link: control.Link, ended: threading.Event) -> None:
    while not ended.wait(WATCHDOG_S / 3):
        with contextlib.suppress(SpecmeterError, OSError):
            place.beat(link)


@dataclass(frozen=True)
class Probing:
    """How a server is to be probed, and where: ``probes`` False starts it without a runtime.

    ``device``: None, "events" (device points outside graphs), or "stamps" (inside them too).
    """

    python: Path | None = None
    recipe: Path | None = None
    probes: bool = True
    model_name: str | None = None
    start_timeout_s: float | None = None
    place: Place = HERE
    device: str | None = None


def planned_link(spec: ServerSpec, probing: Probing) -> control.Link | None:
    """The link for a server that is to be started: plan made and checked, nothing started yet.

    Raises SpecmeterError with the reason if a required point is missing.
    """
    if not probing.probes or not spec.command:
        return None
    name = RECIPE_ENGINES.get(spec.engine or "", spec.engine)
    return probing.place.prepare(spec, name, probing.python, probing.recipe, probing.device)


@contextlib.contextmanager
def link_taken(link: control.Link | None, probing: Probing) -> Iterator[None]:
    """Removes the link where what is inside fails, as a refused --out does: nobody else knows of it yet."""
    try:
        yield
    except BaseException:
        if link is not None:
            probing.place.remove_link(link)
        raise


@contextlib.contextmanager
def session(
    spec: ServerSpec, link: control.Link | None, writer: RunWriter, probing: Probing, progress: Progress, name: str
) -> Iterator[Session]:
    """The server of ``spec``: started with ``link`` and stopped at the end, or the running one, which is left running.

    Its log goes to ``logs/NAME.log`` of the run, its model's name to the run's facts. A link that was made for the
    server goes with it.
    """
    place = probing.place
    if not spec.command:
        running = _running(spec, probing, progress)
        writer.add_facts(model=running.model)
        try:
            yield running
        finally:
            running.server.stop()
        return
    engine = engine_named(spec.engine or "")
    try:
        warning = place.busy_warning()
        if warning:
            progress.say(busy_note(warning, engine.name, spec.command))
        progress.say(f"starting the server ({engine.name})")
        log = writer.logs / f"{name}.log"
        with place.start(engine, spec, log, link, progress.waiting, probing.start_timeout_s) as server:
            progress.clear()
            model = server.model_name(probing.model_name)
            writer.add_facts(model=model)
            yield Session(server, engine, link, model, progress, place)
    finally:
        progress.clear()
        if link is not None:
            with writer.postponing(), contextlib.suppress(OSError):
                writer.save_rings(link.path)
            place.remove_link(link)


def _running(spec: ServerSpec, probing: Probing, progress: Progress) -> Session:
    link = probing.place.find_link(spec.link) if spec.link else None
    if spec.url is None:
        raise SpecmeterError(
            "The server's address is not known.", "A link does not tell it.", "Give --url http://127.0.0.1:PORT too."
        )
    engine = engine_named(spec.engine) if spec.engine is not None else None
    server = probing.place.server_at(spec.url, engine)
    server.use_key(spec)
    server.wait_healthy(10.0, progress.waiting)
    return Session(server, engine, link, server.model_name(probing.model_name), progress, probing.place)


def with_engine(spec: ServerSpec, place: Place = HERE) -> ServerSpec:
    """The same server with its engine's name, asked of the link's plan or of the server's metrics where it is open."""
    if spec.engine is not None or spec.command:
        return spec
    if spec.link is not None:
        planned = str(place.find_link(spec.link).plan().get("engine"))
        return replace(spec, engine=next((ours for ours, its in RECIPE_ENGINES.items() if its == planned), planned))
    if spec.url is None:
        return spec
    server = place.server_at(spec.url)
    server.use_key(spec)
    return replace(spec, engine=engine_of_metrics(server))
