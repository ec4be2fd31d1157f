"""Several servers on one GPU: started side by side, measured one at a time while the others stand still.

Most of a start is Python and compilation on the processor, so starts side by side cost little more than one. A server
that is up polls for requests without rest; it is stopped (SIGSTOP) until it is the one that is measured, so that it
takes neither processor nor GPU. What SGLang takes of the GPU is bounded by ``--max-total-tokens`` then, not by
``--mem-fraction-static``: that one counts what the others hold (mem_cache/kv_cache_configurator.py of 0.5.16).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from gpu_client import OPENAI, Load, Prompt, drive

from specmeter.control import Link, launch_env
from specmeter.control.prepare import prepare_link
from specmeter.engines import engine_named
from specmeter.engines.guardian import descendants
from specmeter.engines.process import ServerProcess, port_is_taken
from specmeter.errors import SpecmeterError
from specmeter.recipes import loader
from specmeter.trace import Request

RING = 1 << 20
FIRST_PORT = 21000
NOT_YET = "not up yet"
MINI = Path(__file__).resolve().parents[1] / "tests/support/mini_sglang"
# Multicast over NVLink stays off wherever these scripts start something (issue 9).
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Start:
    """A server to start. ``linked`` False: specmeter is nowhere near it. ``env`` is added to the environment.

    ``device`` goes into link.json: how the device is timed. ``armed``: from the first import on, so that the graphs are
    captured with the probes in. ``knob_alone``: the points of the knobs are the only ones there are, so that cycles
    cost what they cost while the knob is turned.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    linked: bool = True
    knobs: tuple[str, ...] = ()
    device: Mapping[str, object] = field(default_factory=dict)
    armed: bool = False
    knob_alone: bool = False


@dataclass
class Server:
    """A started server; ``seconds`` is what its start and warm-up took, ``reason`` why it is not up (empty: it is).

    ``requests`` are those of its armed windows.
    """

    start: Start
    process: ServerProcess
    url: str
    link: Link | None
    began: float
    seconds: float = 0.0
    reason: str = NOT_YET
    requests: list[Request] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *descendants(self.process.pid)]

    def signal(self, number: int) -> None:
        """To the server and all below it."""
        for pid in self.pids:
            with suppress(OSError):
                os.kill(pid, number)


@dataclass(frozen=True)
class Place:
    """Where SGLang's packages, the results and the load come from; ``engine`` and ``recipe`` as for prepare_link."""

    work: Path
    site: Path | None
    prompts: Sequence[Prompt]
    engine: str | None = "sglang"
    recipe: Path | None = None

    def env(self) -> dict[str, str]:
        """The environment of every server."""
        own = Path(__file__).resolve().parents[1] / "src"
        path = [str(own), *([str(self.site)] if self.site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ, **SAFE,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(os.pathsep.join(path).split(os.pathsep))),
            "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip


class Fleet:
    """Starts, waits, chooses and ends servers. Use ``with``; a server that failed is left out with its reason."""

    def __init__(self, place: Place, starts: Sequence[Start]) -> None:
        self.place, self.starts = place, starts
        self.servers: dict[str, Server] = {}
        place.work.mkdir(parents=True, exist_ok=True)
        self._links = Path(tempfile.mkdtemp(prefix="links-", dir=place.work))
        self._begun = 0

    def __enter__(self) -> Fleet:
        self.add(self.starts)
        return self

    def add(self, starts: Sequence[Start]) -> None:
        """Begin more servers; ``wait`` waits for them."""
        for start in starts:
            self.servers[start.name] = self._begin(start)

    def drop(self, names: Sequence[str]) -> None:
        """End these servers for good, so that their memory is free; names that are not there are passed over."""
        gone = [self.servers.pop(name) for name in names if name in self.servers]
        _kill(gone)

    def __exit__(self, *exc: object) -> None:
        self.end()

    def wait(self, limit_s: float) -> None:
        """Until each server has answered warm-up requests, has failed, or the time is over; then all stand still."""
        deadline = time.monotonic() + limit_s
        fresh = [server for server in self.servers.values() if server.reason == NOT_YET]
        threads = [threading.Thread(target=self._warm, args=(server, deadline)) for server in fresh]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for server in fresh:
            print(f"{server.start.name}: {server.reason or f'up after {server.seconds:.0f} s'}", flush=True)
            server.process.kill() if server.reason else server.signal(signal.SIGSTOP)

    @contextmanager
    def only(self, name: str) -> Iterator[Server]:
        """Let this server run, and no other. Raises RuntimeError with the reason if it is not up."""
        server = self.servers.get(name)
        if server is None or server.reason:
            raise RuntimeError(f"{name} is not up: {server.reason if server else 'not asked for'}")
        server.signal(signal.SIGCONT)
        try:
            yield server
        finally:
            server.signal(signal.SIGSTOP)

    def facts(self) -> dict[str, dict[str, object]]:
        """Of each start: its command, its own environment, seconds, and why it is not up."""
        return {
            name: {
                "command": list(server.start.command),
                "env": dict(server.start.env),
                "seconds": round(server.seconds, 1),
                "reason": server.reason,
            }
            for name, server in self.servers.items()
        }

    def end(self) -> None:
        """Kill all of them; their logs stay below the place's ``logs``."""
        _kill(list(self.servers.values()))

    def _begin(self, start: Start) -> Server:
        env = {**self.place.env(), **start.env}
        command = start.command
        link = None
        if start.linked:
            link = prepare_link(
                command, engine=self.place.engine, recipe=self.place.recipe, base=self._links,
                capacity=RING, device_events=not start.knob_alone, env=env, knobs=start.knobs, armed=start.armed,
                only=self._knob_points(start.knobs) if start.knob_alone else None,
            )  # fmt: skip
            file = link.path / "link.json"
            file.write_text(json.dumps({**link.document(), **start.device}))
            env = launch_env(link, env)
        # Below the range that the system gives out: two starts side by side never choose the same one.
        port = _port(FIRST_PORT + 20 * self._begun)
        self._begun += 1
        command = engine_named(self.place.engine or "sglang").with_port(command, port)
        if self.place.engine == "sglang":
            command = (*command, "--nccl-port", str(_port(port + 10)))
        log = self.place.work / "logs" / f"{start.name}.log"
        process = ServerProcess(command, env, log)
        url = f"http://127.0.0.1:{port}{OPENAI if self.place.engine == 'vllm' else ''}"
        return Server(start, process, url, link, time.monotonic())

    def _warm(self, server: Server, deadline: float) -> None:
        try:
            while time.monotonic() < deadline:
                if server.process.poll() is not None:
                    server.reason = server.process.failure("The server ended.").why or "it ended"
                    return
                if _answers(server.url):
                    self._first_requests(server)
                    return
                time.sleep(0.5)
            server.reason = f"not up in time; last line: {server.process.last_line()[:200]}"
        except Exception as error:
            server.reason = f"{type(error).__name__}: {error}"

    def _first_requests(self, server: Server) -> None:
        """What is compiled at the first prefill and the first cycles is compiled here, also for eight at once."""
        prompts = self.place.prompts
        answers = [
            *drive(server.url, prompts, Load(1, 32, 1, 2), "warm", "warm").answers,
            *drive(server.url, prompts, Load(1, 32, 8, 8), "warm", "warm").answers,
        ]
        errors = [answer.request.error for answer in answers if answer.request.error]
        server.reason = f"warm-up failed: {errors[0]}" if errors else ""
        server.seconds = time.monotonic() - server.began
        if not server.reason:
            server.signal(signal.SIGSTOP)  # it polls without rest, and others still compile

    def _knob_points(self, knobs: Sequence[str]) -> set[str]:
        place = self.place
        recipe = loader.load(place.recipe) if place.recipe is not None else loader.built_in(place.engine or "sglang")
        return {str(knob["point"]) for knob in recipe.data.get("knob", []) if knob["name"] in knobs}


def _kill(servers: Sequence[Server]) -> None:
    for server in servers:
        server.signal(signal.SIGCONT)
        server.signal(signal.SIGKILL)
    for server in servers:
        with suppress(SpecmeterError):
            server.process.stop(0.5)


def _port(first: int) -> int:
    """The first free port from ``first`` on."""
    return next(port for port in range(first, first + 10) if not port_is_taken(port))


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url.removesuffix(OPENAI)}/v1/models", timeout=5, trust_env=False).status_code == 200
    return False


def miniature(place: Place, starts: Sequence[Start], steps: Sequence[int]) -> tuple[Place, list[Start]]:
    """The same starts with the miniature server of the tests in place of SGLang, without a GPU."""
    site = place.work / "mini"
    shutil.copytree(MINI, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = site / "minisgl-1.2.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: minisgl\nVersion: 1.2\n")
    command = (sys.executable, str(site / "front.py"), "--torch")
    adaptive = (*command, "--adaptive", *map(str, steps))
    small = [replace(start, command=adaptive if start.knobs else command, env={}) for start in starts]
    return replace(place, site=site, engine=None, recipe=site / "minisgl.toml"), small


def sglang(model: Path, *more: str) -> tuple[str, ...]:
    """The command all servers share: the kernels that the carried SGLang has, graphs for 1, 4 and 8 requests.

    Prefill runs without graphs: their capture takes a start a minute, and a decode cycle has none. Each flag was
    looked up in server_args.py of 0.5.16.
    """
    return (
        "python3", "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "bfloat16",
        "--attention-backend", "triton", "--sampling-backend", "pytorch",
        "--max-running-requests", "8", "--cuda-graph-bs-decode", "1", "4", "8", "--disable-prefill-cuda-graph",
        "--enforce-disable-flashinfer-allreduce-fusion", "--incremental-streaming-output", "--enable-metrics",
        "--skip-server-warmup", "--watchdog-timeout", "1800", *more,
    )  # fmt: skip


def eagle(head: Path, steps: int) -> tuple[str, ...]:
    """EAGLE-3 with a chain of ``steps`` drafts."""
    return (
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head),
        "--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(steps + 1),
    )  # fmt: skip
