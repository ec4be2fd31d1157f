"""``specmeter status``: the links of this user and what each of their processes says about itself."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from specmeter import __version__
from specmeter.commands.link_options import add_link_arguments
from specmeter.control import holder
from specmeter.control.hits import count_hits
from specmeter.control.link import Link, find_link, links
from specmeter.control.processes import Ack, Process, processes
from specmeter.errors import Exit
from specmeter.reporters.inert import inert


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``status``."""
    add_link_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print every link, or the one that is named."""
    chosen = [find_link(args.link)] if args.link else links()
    described = [_describe(link) for link in chosen]
    if args.json:
        print_json("status", {"links": described})
        return 0
    if not described:
        print("No link: no server was started by `specmeter run` for this user.")
    for entry in described:
        _print_link(entry)
    return 0


def print_outcome(command: str, link: Link, ack: Ack, as_json: bool) -> int:
    """Print what the processes answered to ``command``; returns 0, or 4 when a live one stayed silent."""
    code = code_of(ack)
    if as_json:
        print_json(command, outcome_of(link, ack))
        return int(code)
    if not ack.done and not ack.silent:
        print(f"Link {link.id}: no process has imported a module of the plan yet; those to come will follow.")
    else:
        _print_link(_describe(link))
    print_silent(ack)
    return int(code)


def code_of(ack: Ack) -> Exit:
    """The exit code of a command that was answered so."""
    return Exit.SERVER_FAILED if ack.silent else Exit.DONE


def outcome_of(link: Link, ack: Ack) -> dict[str, Any]:
    """The link as it is now and what its processes answered, for ``--json``."""
    return {**_describe(link), "generation": ack.generation, "silent": [process.pid for process in ack.silent]}


def print_silent(ack: Ack) -> None:
    """Name the live processes that did not answer."""
    for process in ack.silent:
        print(f"process {process.pid} did not answer: its control thread is gone, or the process is stopped")


def print_json(command: str, result: dict[str, Any]) -> None:
    """Print the JSON document of a command."""
    document = {"schema": f"specmeter/{command}/1", "version": __version__, "command": command, "result": result}
    print(json.dumps({**document, "warnings": []}))


def _describe(link: Link) -> dict[str, Any]:
    document = link.document()
    plan = link.plan()
    names = {int(point["id"]): str(point["name"]) for point in plan["points"]}
    found = [_describe_process(process, names) for process in processes(link)]
    reason = None if found else "no process has imported a module of the plan with the runtime on its path"
    wanted = document["state"]
    return {
        "link": link.id,
        "path": str(link.path),
        "engine": {"name": plan.get("engine"), "version": plan.get("engine_version")},
        "command": document["command"],
        "armed": bool(wanted["armed"]),
        "generation": int(wanted["generation"]),
        "sampling": wanted.get("mix") if wanted["armed"] else None,
        "armed_by": wanted.get("armed_by"),
        "controller": holder.holder(link),
        "processes": found,
        "reason": reason,
    }


def _describe_process(process: Process, names: dict[int, str]) -> dict[str, Any]:
    report = process.report
    hits = count_hits(process.ring)
    keys = (
        "engine", "rank", "world", "armed", "generation", "modules", "refused", "in_flight", "faults", "lanes",
        "sampling", "nvtx",
    )  # fmt: skip
    return {
        "pid": process.pid,
        "alive": process.alive,
        **{key: report.get(key) for key in keys},
        "points": [
            {
                "id": id,
                "name": names.get(id),
                "armed": id in report.get("armed_points", ()),
                "hits": hits.get(id, 0),
            }
            for id in report.get("points", ())
        ],
        "disarmed": [{**entry, "name": names.get(entry["point"])} for entry in report.get("disarmed", ())],
        "refused_values": report.get("refused_values", {}),
    }


def _print_link(entry: dict[str, Any]) -> None:
    state = "armed" if entry["armed"] else "dormant"
    engine = inert(" ".join(str(part) for part in entry["engine"].values() if part), 60)
    print(f"link {entry['link']}  {engine}  {state}  {' '.join(entry['command'])}")
    if entry["armed"] and entry["armed_by"]:
        print(f"  armed by {holder.describe(entry['armed_by'])}")
    if entry["sampling"]:
        print(f"  {sampling_line(entry['sampling'], entry['processes'])}")
    if entry["controller"] is not None and entry["controller"].get("pid") != os.getpid():
        print(f"  controlled by {holder.describe(entry['controller'])}: still running")
    if entry["reason"]:
        print(f"  {entry['reason']}")
    for process in entry["processes"]:
        _print_process(process)


def sampling_line(wanted: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Which share of the cycles has the probes, why, and what number the processes draw by."""
    head = wanted.get("why") or f"{wanted['permille'] / 10:g} % of the cycles have the probes, drawn at random"
    counters = {(process.get("sampling") or {}).get("counter") for process in found if process["alive"]} - {None}
    words = {
        "iteration": "the engine's forward counter",
        "cycle": "each process's own count of cycles",
        "clock": "the host's clock in slots of 134 ms",
    }
    by = " and ".join(words.get(str(counter), str(counter)) for counter in sorted(map(str, counters)))
    return f"{head}; drawn by {by}" if by else head


def _print_process(process: dict[str, Any]) -> None:
    points = process["points"]
    armed = sum(point["armed"] for point in points)
    hit = sum(point["hits"] > 0 for point in points)
    rank = "" if process["rank"] is None else f"  rank {process['rank']}"
    ended = "" if process["alive"] else "  (ended)"
    print(f"  process {process['pid']}{ended}{rank}  {armed} of {len(points)} points armed, {hit} hit")
    if process.get("nvtx") and process["nvtx"]["reason"]:
        print(f"    no NVTX ranges: {process['nvtx']['reason']}")
    for entry in process["refused"]:
        print(f"    refused: {entry['module']}: {entry['reason']}")
    for entry in process["disarmed"]:
        print(f"    disarmed itself: {entry['name']} ({entry['exception']})")
    for qualname in process["in_flight"] or ():
        print(f"    a frame of {qualname} is still in flight with its probes; it records nothing more")
    for fault in process["faults"] or ():
        print(f"    fault: {fault}")
