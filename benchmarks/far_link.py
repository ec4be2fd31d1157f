"""What a far link costs: ``source`` and ``plan`` over a connection with 50 ms round trip and a limited rate.

A proxy between the ssh client and a real sshd on loopback delays every byte by half the round trip and limits the rate
(``netem`` is not everywhere). *Connected* runs use a control socket of ssh, so that they begin on a connection that is
up; *whole* runs connect anew each time. Runs are interleaved; medians and ranges in milliseconds, the local process's
start included. Round trips are told by the time that the delay adds: (median with the delay - median without) / delay,
beside the proxy's count of the client's bursts that were followed by an answer (an upper bound).

*Cold* means without specmeter's own index; the operating system's file cache is warm. Needs root, for the sshd.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from corpus_fetch import fetch  # noqa: E402

from tests.support.children import until  # noqa: E402
from tests.support.loopback_ssh import Loopback, free_port, loopback_sshd  # noqa: E402
from tests.support.real_vllm import healthy  # noqa: E402
from tests.support.tcp_proxy import TcpProxy  # noqa: E402

MODULE = "sglang.srt.speculative.eagle_worker_v2"
AIMS_MS = {"source, connected": 500, "plan cold, connected": 3000}


class Link:
    """One proxy with its two host names: ``NAME`` connects anew, ``NAME-up`` uses a connection that is up."""

    def __init__(self, name: str, loopback: Loopback, proxy: TcpProxy, tree: Path) -> None:
        self.name = name
        self.proxy = proxy
        self._tree = tree
        self._cache = loopback.folder / f"cache-{name}"
        self.env = {**os.environ, "PATH": f"{loopback.bin}:{os.environ['PATH']}"}
        loopback.add_host(name, proxy.port)
        socket = str(loopback.folder / f"up-{name}")
        loopback.add_host(f"{name}-up", proxy.port, ControlPath=socket, ControlMaster="no")
        master = ["ssh", "-fNM", "-S", socket, name]
        subprocess.run(master, env=self.env, check=True, stderr=subprocess.DEVNULL)
        self._closing = ["ssh", "-S", socket, "-O", "exit", name]

    def close(self) -> None:
        """End the connection that is up."""
        subprocess.run(self._closing, env=self.env, capture_output=True, check=False)

    def nothing(self, connected: bool) -> list[str]:
        """The bare ssh of the same connection."""
        return ["ssh", self._host(connected), "true"]

    def source(self, connected: bool) -> list[str]:
        """Outline one module."""
        return self._command(connected, "source", "--path", str(self._tree), MODULE, "--json")

    def plan(self, connected: bool) -> list[str]:
        """The plan, with an index that has to be made there."""
        return self._command(connected, "plan", "--engine", "sglang", "--path", str(self._tree), "--json")

    def timed(self, command: list[str], cold: bool) -> tuple[float, int, int, int]:
        """Milliseconds, the client's bursts that were answered, bytes sent and received."""
        if cold:
            shutil.rmtree(self._cache, ignore_errors=True)
        before = vars(self.proxy.traffic).copy()
        began = time.perf_counter()
        done = subprocess.run(command, env=self.env, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        spent = (time.perf_counter() - began) * 1e3
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{command}: {done.stderr.decode()[-600:]}")
        after = self.proxy.traffic
        return (
            spent,
            after.exchanges - before["exchanges"],
            after.sent_bytes - before["sent_bytes"],
            after.received_bytes - before["received_bytes"],
        )

    def _host(self, connected: bool) -> str:
        return f"{self.name}-up" if connected else self.name

    def _command(self, connected: bool, *words: str) -> list[str]:
        on = f"ssh {self._host(connected)} env XDG_CACHE_HOME={self._cache}"
        return [sys.executable, "-m", "specmeter", "--on", on, "--far-python", sys.executable, *words]


def tasks(link: Link) -> dict[str, tuple[list[str], bool]]:
    """What is timed on one link: name -> command, and whether the index is removed before it."""
    return {
        "ssh true": (link.nothing(False), False),
        "ssh true, connected": (link.nothing(True), False),
        "source": (link.source(False), True),
        "source, connected": (link.source(True), True),
        "plan cold": (link.plan(False), True),
        "plan cold, connected": (link.plan(True), True),
        "plan warm, connected": (link.plan(True), False),
    }


def live(link: Link, folder: Path, requests: int) -> dict[str, Any]:
    """Bytes a second of a live profile over the link: the embedded engine there, ``profile --on`` from here."""
    port = free_port()
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    own = [sys.executable, "-m", "specmeter"]
    serve = [*own, "run", "--link", "live", "--", *own, "serve", "--port", str(port)]
    with subprocess.Popen(serve, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: server.poll() is not None or healthy(url), "the server", 120)
            words = ["profile", "--link", "live", "--url", url, "--baseline", "none", "--requests", str(requests)]
            words += ["--max-tokens", "64"]
            on = ["--on", f"ssh {link.name}-up env XDG_RUNTIME_DIR={folder}", "--far-python", sys.executable]
            profile = [*own, *on, *words, "--out", str(folder / "run"), "--json"]
            return _rate(link, profile)
        finally:
            server.terminate()


def _rate(link: Link, command: list[str]) -> dict[str, Any]:
    """Run the command and take the proxy's count every quarter of a second."""
    seen = [link.proxy.traffic.received_bytes]
    with subprocess.Popen(command, env=link.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        while child.poll() is None:
            time.sleep(0.25)
            seen.append(link.proxy.traffic.received_bytes)
        assert child.stderr is not None
        if child.returncode:
            raise RuntimeError(child.stderr.read().decode()[-600:])
    seconds = [(later - first) / 1e3 for first, later in zip(seen, seen[4:], strict=False)]
    # Without the parts before and after the load, in which nothing is measured.
    busy = [rate for rate in seconds if rate > 1.0]
    return {
        "seconds": len(busy) / 4,
        "mean_kb_s": round(statistics.mean(busy), 1) if busy else None,
        "most_kb_s": round(max(seconds), 1) if seconds else None,
        "received_kb": round((seen[-1] - seen[0]) / 1e3, 1),
        "aim_kb_s": 100,
    }


@contextlib.contextmanager
def links(loopback: Loopback, tree: Path, round_trip_s: float, rate: float) -> Iterator[dict[str, Link]]:
    """The far link and one without delay or limit; what remains of the time is not the link's."""
    with TcpProxy(loopback.port, round_trip_s / 2, rate) as far, TcpProxy(loopback.port) as near:
        found = {name: Link(name, loopback, proxy, tree) for name, proxy in (("slow", far), ("quick", near))}
        try:
            yield found
        finally:
            for link in found.values():
                link.close()


def measure(found: dict[str, Link], repeats: int) -> dict[tuple[str, str], list[tuple[float, int, int, int]]]:
    """Every task of every link, interleaved; one round before is left out."""
    seen: dict[tuple[str, str], list[tuple[float, int, int, int]]] = {}
    for turn in range(repeats + 1):
        for name, link in found.items():
            for task, (command, cold) in tasks(link).items():
                figures = link.timed(command, cold)
                if turn:
                    seen.setdefault((name, task), []).append(figures)
    return seen


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--round-trip-ms", type=float, default=50.0)
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--live", type=int, metavar="N", help="also the traffic of a profile with N requests")
    parser.add_argument("--release", default="sglang==0.5.23")
    args = parser.parse_args()
    tree = fetch(args.release)
    with (
        tempfile.TemporaryDirectory(prefix="specmeter-link-") as folder,
        loopback_sshd(Path(folder) / "ssh") as loopback,
        links(loopback, tree, args.round_trip_ms / 1e3, args.rate_mbit * 125e3) as found,
    ):
        seen = measure(found, args.repeats)
        streamed = live(found["slow"], Path(folder), args.live) if args.live else None
    facts = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], **vars(args)}
    print(json.dumps({**facts, "tasks": summary(seen, args.round_trip_ms), "live": streamed}, indent=1))


def summary(seen: dict[tuple[str, str], list[tuple[float, int, int, int]]], round_trip_ms: float) -> dict[str, Any]:
    """Medians and ranges of the slow link, and the round trips that its delay shows."""

    def pick(link: str, task: str, place: int) -> list[float]:
        return [run[place] for run in seen[link, task]]

    answer = {}
    for link, task in seen:
        if link != "slow":
            continue
        slow, quick = pick("slow", task, 0), pick("quick", task, 0)
        answer[task] = {
            "median_ms": round(statistics.median(slow), 1),
            "range_ms": [round(min(slow), 1), round(max(slow), 1)],
            "without_delay_ms": round(statistics.median(quick), 1),
            "round_trips": round((statistics.median(slow) - statistics.median(quick)) / round_trip_ms, 1),
            "answered_bursts": statistics.median(pick("slow", task, 1)),
            "sent_kb": round(statistics.median(pick("slow", task, 2)) / 1e3, 1),
            "received_kb": round(statistics.median(pick("slow", task, 3)) / 1e3, 1),
            "aim_ms": AIMS_MS.get(task),
        }
    return answer


if __name__ == "__main__":
    main()
