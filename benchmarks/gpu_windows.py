"""Windows on one running server: what is measured there, each as a function that gives a JSON document.

Times come from the rings and from the client's clock; probes are in only while a window needs them.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from gpu_client import OPENAI, Answers, Load, Prompt, drive
from gpu_fleet import Server
from numpy.typing import NDArray

from specmeter import control
from specmeter.analysis.profile import Baseline, analyse, baseline_from_trace
from specmeter.analysis.stats import Interval
from specmeter.bench.budget import share_for
from specmeter.control.deep import DeepAsked, deep_window
from specmeter.control.hits import count_hits
from specmeter.engines.prometheus import Metrics
from specmeter.reporters.terminal import render_analysis
from specmeter.runtime import layout
from specmeter.trace import Request, Trace, load_link
from specmeter.trace.cycles import DECODE, cycle_at
from specmeter.trace.deep import save_deep
from specmeter.trace.plan import index_plan
from specmeter.trace.ring import Ring, read_ring
from specmeter.trace.rundir import RunWriter

TOKENS = Load(rounds=1, tokens=128, prompts=8)
PLAIN, SPEC = "baseline", "spec"


def link_of(server: Server) -> control.Link:
    """The server's link. Raises RuntimeError for one that has none."""
    if server.link is None:
        raise RuntimeError(f"{server.start.name} runs without the runtime")
    return server.link


def tokens(server: Server, prompts: Sequence[Prompt], armed: bool = False) -> dict[str, Any]:
    """The greedy ids of each prompt, asked one at a time, with the probes in or (as they are) out."""
    if armed:
        control.arm(link_of(server))
    answers = drive(server.url, prompts, TOKENS, "tokens", SPEC)
    if armed:
        control.disarm(link_of(server))
    return {**answers.summary(), "ids_of": {name: list(ids) for name, ids in answers.by_prompt().items()}}


def phases(
    server: Server, prompts: Sequence[Prompt], load: Load, out: Path, name: str, baseline: Baseline | None
) -> dict[str, Any]:
    """A window with all probes in; ``baseline`` None: this server is the baseline."""
    link, setting = link_of(server), PLAIN if baseline is None else SPEC
    ack = control.arm(link)
    answers = drive(server.url, prompts, load, name, setting)
    reports = [process.report for process in control.processes(link)]
    control.disarm(link)
    server.requests += answers.requests
    trace = load_link(link.path, answers.requests)
    document = analyse(trace, answers.requests, baseline, setting, rings(link))
    text = render_analysis(document, width=110)
    (out / f"{name}.txt").write_text(text)
    step = baseline_from_trace(trace).step_ms if baseline is None else None
    return {
        "line": f"cycle {document['cycle']['mean_ms']['point']:.3f} ms",
        "load": vars(load),
        "client": answers.summary(),
        "silent": len(ack.silent),
        "step_ms": step.as_json() if step else None,
        "device_medians": device_medians(link, trace, answers.requests),
        "hits": hits(link),
        "processes": reports,
        "analysis": document,
    }


def mixed(server: Server, prompts: Sequence[Prompt], load: Load, baseline: Baseline) -> dict[str, Any]:
    """Probes and the original code at random from cycle to cycle: what a cycle with all probes costs, in one start.

    ``share`` is the share of cycles that the default budget of 1 % allows after that.
    """
    link = link_of(server)
    # A quarter: stretches of clean cycles show what the cycle point alone costs. Asked again, each process reports.
    control.mix(link, seed=7, permille=250)
    answers = drive(server.url, prompts, load, "mixed", SPEC)
    reports = [process.report for process in control.mix(link, seed=7, permille=250).done]
    control.disarm(link)
    trace = load_link(link.path, answers.requests)
    document = analyse(trace, answers.requests, baseline, SPEC)
    share = share_for(1.0, trace.main, answers.requests, reports)
    overhead = document["overhead"] or {}
    percent = (overhead.get("percent") or {}).get("point")
    return {
        "line": f"full probes cost {percent} % of a cycle; share at 1 %: {share.permille} of 1000",
        "client": answers.summary(),
        "overhead": overhead,
        "share": share.as_json(),
    }


def deep(
    server: Server,
    prompts: Sequence[Prompt],
    cycles: int,
    at_once: int,
    setting: str = SPEC,
    prepare: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """A deep window of so many cycles under load, with ordinary cycles before and after it.

    ``prepare`` is called once the probes are in.
    """
    link = link_of(server)
    asked: list[DeepAsked | Exception] = []

    def ask() -> None:
        try:
            asked.append(deep_window(link, cycles, f"{server.start.name} {setting} batch {at_once}"))
        except Exception as error:
            asked.append(error)

    control.arm(link)
    if prepare is not None:
        prepare()
    answers = Answers()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    load, rounds = Load(1, 192, at_once, max(at_once, 2)), 0
    while thread.is_alive() and rounds < 400:
        answers.answers += drive(server.url, prompts, load, f"deep{at_once}-{rounds}", setting).answers
        rounds += 1
    answers.answers += drive(server.url, prompts, load, f"deep{at_once}-after", setting).answers
    thread.join(30)
    control.disarm(link)
    server.requests += answers.requests
    if not asked or isinstance(asked[0], Exception):
        raise RuntimeError(f"no deep window: {asked[0] if asked else 'it did not end'}")
    return {"asked": asdict(asked[0]), "client": answers.summary(), "loads": rounds}


def baseline_of(document: dict[str, Any] | None) -> Baseline:
    """The baseline that a ``phases`` window of the plain server measured."""
    if document is None or not document.get("step_ms"):
        return Baseline(None, "plain server", "the plain server was not measured")
    fields = {**document["step_ms"]}
    for end, value in (("low", -np.inf), ("point", np.nan), ("high", np.inf)):
        fields[end] = value if fields[end] is None else fields[end]
    return Baseline(Interval(**fields), "cycles of the plain server on the same GPU")


def rings(link: control.Link) -> list[Ring]:
    """The link's rings."""
    return [read_ring(path) for path in sorted(link.path.glob("*.ring"))]


def device_medians(link: control.Link, trace: Trace, requests: Sequence[Request]) -> dict[str, dict[str, float]]:
    """Of each device point: median, 95th percentile and mean, ms, of its spans in decode cycles while requests ran.

    Prefills are left out: a prefill's forward is many times a decode's, and one in a hundred moves a mean by a tenth.
    """
    index = index_plan(link.plan())
    begin, end = min(r.send_ns for r in requests), max(r.end_ns for r in requests)
    found: dict[str, list[Any]] = {}
    for ring in rings(link):
        host = ring.records[ring.records["kind"] == layout.KIND_HOST_SPAN]
        host = host[(host["t0"] >= begin) & (host["t0"] <= end)]
        inside = np.unique(host["cycle"][decoding(trace, ring, host["t0"].astype(np.int64))])
        spans = ring.records[ring.records["kind"] == layout.KIND_DEVICE_SPAN]
        kept = spans[np.isin(spans["cycle"].astype(np.int64) - spans["value"], inside)]
        for point in np.unique(kept["point"]):
            of = kept[kept["point"] == point]
            found.setdefault(index.names[index.name_of[point]], []).extend((of["t1"] - of["t0"]) / 1e6)
    return {
        name: {
            "count": len(values),
            "median_ms": float(np.median(values)),
            "p95_ms": float(np.percentile(values, 95)),
            "mean_ms": float(np.mean(values)),
        }
        for name, values in sorted(found.items())
    }


def decoding(trace: Trace, ring: Ring, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these times of a ring's process lie in decode cycles of its rank."""
    found = np.zeros(len(at), bool)
    for rank in trace.ranks:
        if rank.host == ring.header.host and (rank.pid == ring.header.pid or rank.rank == ring.header.rank):
            row = cycle_at(rank.cycles.t0_ns, at)
            found |= (row >= 0) & (rank.cycles.kind[np.maximum(row, 0)] == DECODE)
    return found


def hits(link: control.Link) -> dict[str, Any]:
    """Hits by point name over all processes, and the required points that none ever passed."""
    total: dict[int, int] = {}
    for process in control.processes(link):
        for point, count in count_hits(process.ring).items():
            total[point] = total.get(point, 0) + count
    names: dict[str, int] = {}
    for point in link.plan()["points"]:
        names[point["name"]] = names.get(point["name"], 0) + total.get(point["id"], 0)
    needed = {point["name"] for point in link.plan()["points"] if point["required"]}
    return {"by_name": names, "required_never_hit": sorted(name for name in needed if not names[name])}


def metrics(server: Server) -> Metrics:
    """The server's Prometheus figures now."""
    return Metrics(httpx.get(f"{server.url.removesuffix(OPENAI)}/metrics", timeout=10, trust_env=False).text)


def save_run(server: Server, out: Path, baseline: Baseline | None) -> dict[str, Any]:
    """A run directory ``out``/run-NAME with rings, tables and deep windows of all armed windows.

    Its analysis is of the requests that ran alone: ``baseline`` is a step at batch 1, and cycles of eight requests
    in a mean with those of one are cycles of neither.
    """
    link, folder = link_of(server), out / f"run-{server.start.name}"
    shutil.rmtree(folder, ignore_errors=True)
    writer = RunWriter.create(folder, server.start.command)
    writer.write_plan(link.plan())
    writer.save_rings(link.path)
    windows = save_deep(link.path, folder)
    writer.write_trace(load_link(link.path, server.requests))
    writer.write_requests(server.requests)
    setting, single = PLAIN if baseline is None else None, alone(server.requests)
    writer.write_analysis(analyse(load_link(link.path, single), single, baseline, setting, rings(link)))
    writer.finish("complete")
    return {"line": f"{windows} deep windows, {len(server.requests)} requests", "windows": windows}


def alone(requests: Sequence[Request]) -> list[Request]:
    """The requests during which no other one ran; all of them where none ran alone."""
    found, until = [], 0
    ordered = sorted(requests, key=lambda request: request.send_ns)
    for request, following in zip(ordered, [*ordered[1:], None], strict=True):
        if request.send_ns >= until and (following is None or following.send_ns >= request.end_ns):
            found.append(request)
        until = max(until, request.end_ns)
    return found or list(requests)


def same_ids(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """``8 of 8`` prompts with the same ids, or why that is not known."""
    if one is None or other is None:
        return "not measured"
    left, right = one["ids_of"], other["ids_of"]
    return f"{sum(left[name] == right.get(name) for name in left)} of {len(left)}"
