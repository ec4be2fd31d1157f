"""Another host as the place of a session: servers, probes and load there, analysis here."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specmeter import control
from specmeter.bench.client import PATHS, READ_TIMEOUT_S, Api, Call, request_body
from specmeter.bench.load import Load, LoadResult, OnDone
from specmeter.control.deep import DeepAsked
from specmeter.engines import Engine, Server, ServerSpec
from specmeter.engines.access import listening_host, url_of
from specmeter.engines.server import Progress
from specmeter.errors import SpecmeterError
from specmeter.hosts.deep import far_window
from specmeter.hosts.driven import Driven, arrivals
from specmeter.hosts.far_relay import GONE_S
from specmeter.hosts.frames import Message
from specmeter.hosts.mirror import FarLink, Mirror, Shift
from specmeter.hosts.relay import Relay
from specmeter.hosts.server import FarTransport, Processes
from specmeter.hosts.shapes import checked_plan, sent
from specmeter.reporters.inert import inert
from specmeter.tune.flags import EngineFlags

_IDLE = "Nothing was started or armed there."
_STARTED = f"The server that was started there is ended by the far side, at once or {GONE_S:.0f} s after the last word."


class There:
    """One far host. ``mirrors`` are the links that are read, by id."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.mirrors: dict[str, Mirror] = {}
        self._processes = Processes(relay)
        self._drives = itertools.count(1)
        self._outcomes: dict[int, Driven] = {}
        self._started = 0
        self._armed_s: float | None = None
        self._live: dict[str, Any] | None = None
        self._before = relay.traffic()
        self.lost_records = 0
        for event in ("process", "ring", "records"):
            relay.listen(event, self._heard)
        relay.listen("outcome", self._heard_outcome)

    @property
    def names(self) -> tuple[str, ...]:
        """The host."""
        return (self.relay.host.name,)

    def facts(self) -> dict[str, Any]:
        """The machine there, and what the session has sent and received."""
        head = {"host": self.relay.host.name, "there": self.relay.facts, "stream": self.relay.traffic()}
        return {"on": [{**head, "stream_while_armed": self._live, "lost_records": self.lost_records}]}

    def notes(self) -> list[str]:
        """What got lost on the way."""
        if not self.lost_records:
            return []
        return [f"{self.lost_records} records of {self.names[0]} were overwritten there before they came over"]

    def close(self) -> None:
        """End the session; mirrors go."""
        self.relay.close()
        for mirror in self.mirrors.values():
            mirror.close()

    def prepare(
        self,
        spec: ServerSpec,
        engine: str | None,
        python: Path | None,
        recipe: Path | None,
        device: str | None = None,
    ) -> control.Link:
        """Plan there, with that host's interpreter and files."""
        described, _ = self.relay.call(
            "prepare",
            command=list(spec.command),
            env=dict(spec.env),
            engine=engine,
            python=None if python is None else str(python),
            recipe=None if recipe is None else str(recipe),
            device=device,
        )
        return self._checked(described)

    def find_link(self, name: str | None) -> control.Link:
        """A link of that host; one that was found before is not asked for again."""
        if name is not None and name in self.mirrors:
            return self.mirrors[name].link
        return self._checked(self.relay.call("find", link=name)[0])

    def _checked(self, described: Mapping[str, Any]) -> FarLink:
        try:
            checked_plan(described)
            return self.mirror(described).link
        except SpecmeterError as error:
            raise self.relay.named(error) from None

    def mirror(
        self,
        described: Mapping[str, Any],
        shift: Shift | None = None,
        prefix: str = "",
        beside: Mirror | None = None,
        name: str | None = None,
    ) -> Mirror:
        """A mirror of a link as the far side described it."""
        mirror = Mirror(described, shift, prefix, beside, name)
        self.mirrors[mirror.link.far_id] = mirror
        return mirror

    def remove_link(self, link: control.Link) -> None:
        """Remove it there, if it was made for us, and its mirror."""
        mirror = self.mirrors.pop(_far_id(link), None)
        if mirror is not None:
            mirror.close()
        with contextlib.suppress(SpecmeterError):
            self.relay.call("remove", link=_far_id(link))

    def start(
        self,
        engine: Engine,
        spec: ServerSpec,
        log_path: Path,
        link: control.Link | None,
        progress: Progress,
        timeout_s: float | None,
    ) -> Server:
        """Start it there, in a session of its own, and wait until it is healthy."""
        stated = engine.command_port(spec.command)
        host = listening_host(spec.command)
        port = int(self.relay.call("port", stated=stated, host=host)[0]["port"])
        command = spec.command if stated is not None else engine.with_port(spec.command, port)
        if link is not None:
            self.relay.call("watch", link=_far_id(link))
        self._started += 1
        self._say_state()
        process = self._processes.start(command, spec.env, log_path, None if link is None else _far_id(link))
        server = Server(url_of(listening_host(command), port), engine, process, FarTransport(self.relay))
        try:
            server.use_key(spec)
            server.wait_healthy(timeout_s or engine.default_start_timeout_s(), progress)
        except BaseException:
            server.stop()
            raise
        return server

    def server_at(self, url: str, engine: Engine | None = None) -> Server:
        """As that host reaches it."""
        return Server(url, engine, None, FarTransport(self.relay))

    def wait_for_processes(self, link: control.Link, count: int, timeout_s: float) -> None:
        """Wait there."""
        self.relay.call("wait", link=_far_id(link), count=count, timeout_s=timeout_s)

    def arm(
        self,
        link: control.Link,
        timeout_s: float,
        watchdog_s: float,
        sampling: control.Sampling | None = None,
        nvtx: bool | None = None,
    ) -> Sequence[int]:
        """The far end becomes the link's controller."""
        self.relay.call("watch", link=_far_id(link))
        self._armed_s = watchdog_s
        self._say_state()
        drawn = sampling.as_json() if sampling is not None else None
        answer, _ = self.relay.call(
            "arm", link=_far_id(link), timeout_s=timeout_s, watchdog_s=watchdog_s, sampling=drawn, nvtx=nvtx
        )
        silent = answer["silent"]
        self._before = self.relay.traffic()
        return [int(pid) for pid in silent]

    def beat(self, link: control.Link) -> None:
        """Passed on there."""
        self.relay.call("beat")

    def disarm(self, link: control.Link, timeout_s: float) -> None:
        """Disarm there."""
        self._live = {key: round(value - self._before[key], 3) for key, value in self.relay.traffic().items()}
        self.relay.call("disarm", link=_far_id(link), timeout_s=timeout_s)
        self._armed_s = None
        self._say_state()

    def deep(self, link: control.Link, cycles: int, label: str, deadline_s: float) -> DeepAsked:
        """Ask its processes there, and have what they wrote sent over."""
        return far_window(self.relay, self.mirrors[_far_id(link)], cycles, label, deadline_s)

    def collect(self, link: control.Link) -> None:
        """Have the rest of the rings sent, and wait until it has been written."""
        self.lost_records += int(self.relay.call("collect", link=_far_id(link))[0]["lost"])
        self.relay.check_fault(disk=True)

    def drive(
        self, base_url: str, model: str, calls: Sequence[Call], load: Load, api: Api, on_done: OnDone
    ) -> LoadResult:
        """Have the load generator there send them."""
        number = next(self._drives)
        driven = self._outcomes[number] = Driven(calls, api, on_done)
        bodies = [json.dumps(request_body(call, model, api)).encode() for call in calls]
        try:
            answer, _ = self.relay.call(
                "drive",
                b"".join(bodies),
                drive=number,
                sizes=[len(body) for body in bodies],
                url=base_url,
                path=PATHS[api],
                headers=dict(calls[0].headers) if calls else {},
                timeout_s=READ_TIMEOUT_S,
                concurrency=load.concurrency,
                due_s=None if load.rate is None else arrivals(len(calls), load.rate, load.seed),
                stop_on_error=load.stop_on_error,
                ramp_s=load.ramp_s,
            )
        except KeyboardInterrupt:
            self.relay.call("halt", drive=number)
            raise
        finally:
            self._outcomes.pop(number)
        self.relay.check_fault()
        outcomes = [driven.outcomes[index] for index in sorted(driven.outcomes)]
        if len(outcomes) < len(calls) and not (load.stop_on_error and any(one.error for one in outcomes)):
            raise self.relay.named(sent(f"{len(outcomes)} outcomes of {len(calls)} requests"))
        return LoadResult(tuple(outcomes), float(answer["wall_s"]), float(answer["cpu_share"]), answer["full_ns"])

    def busy_warning(self) -> str | None:
        """Of that host."""
        warning = self.relay.call("busy")[0]["warning"]
        return None if warning is None else inert(warning, 400)

    def variables(self, pid: int, names: Sequence[str]) -> Mapping[str, str]:
        """From /proc there."""
        if not names:
            return {}
        found = self.relay.call("variables", pid=pid, names=list(names))[0]["found"]
        return {str(name): str(value) for name, value in found.items()}

    def engine_flags(self, spec: ServerSpec) -> EngineFlags:
        """The flags of the engine that is installed there."""
        found, _ = self.relay.call("flags", command=list(spec.command), env=dict(spec.env), engine=spec.engine)
        choices = {str(flag): tuple(map(str, values)) for flag, values in found["choices"].items()}
        return EngineFlags(choices, str(found["source"]), found["version"], frozenset(found["fields"]))

    def _say_state(self) -> None:
        """What a lost connection leaves, for the error that tells of it."""
        parts = [_STARTED] if self._started else []
        if self._armed_s is not None:
            parts.append(f"Probes that were put in are out {self._armed_s:.0f} s after the last word at the latest.")
        self.relay.state = " ".join(parts) or _IDLE

    def _heard(self, message: Message, payload: bytes) -> None:
        mirror = self.mirrors.get(str(message["link"]))
        if mirror is not None:
            mirror.take(message, payload)

    def _heard_outcome(self, message: Message, payload: bytes) -> None:
        driven = self._outcomes.get(int(message["drive"]))
        if driven is not None:
            driven.take(message, payload)


def _far_id(link: control.Link) -> str:
    return link.far_id if isinstance(link, FarLink) else link.id
