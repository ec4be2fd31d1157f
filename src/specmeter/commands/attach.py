"""``specmeter attach PID``: the runtime into a process that runs already, dormant until armed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.attach import obstacles, routes
from specmeter.attach.obstacles import Obstacle
from specmeter.attach.routes import Closed
from specmeter.commands.link_options import add_always_on_arguments, sampling_for
from specmeter.commands.source import process_of
from specmeter.control.link import Link, make_link, remove_link
from specmeter.control.processes import arm, processes
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes.planner import missing_points, survey
from specmeter.source.process import Process


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``attach``."""
    parser.add_argument("pid", type=int, metavar="PID", help="a running Python server")
    parser.add_argument("--how", choices=("auto", *routes.ROUTES), default="auto", help="take this route only")
    parser.add_argument("--engine", metavar="NAME[==V]", help="sglang, vllm or specmeter; otherwise the one installed")
    parser.add_argument("--recipe", type=Path, action="append", metavar="F", help="a recipe of your own")
    parser.add_argument("--link", metavar="ID", help="id of the link to make")
    parser.add_argument("--records", type=int, metavar="N", help="records a process keeps (32 bytes each)")
    parser.add_argument("--armed", action="store_true", help="arm at once")
    add_always_on_arguments(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for the process")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Take the first open route; exit 3 with each route's obstacle when none is, 4 when the process stays silent."""
    facts = obstacles.gather(args.pid)
    obstacle = facts if isinstance(facts, Obstacle) else obstacles.common(facts)
    if obstacle is not None or isinstance(facts, Obstacle):
        raise _refused(args.pid, [Closed("any", obstacle)] if obstacle else [])
    there = routes.carried(args.pid)
    if there is not None:
        return _done(args, there, "its own control line")
    obstacle = obstacles.for_ptrace(facts)  # of every route; without it /proc may not even tell what runs there
    if obstacle is not None:
        raise _refused(args.pid, [Closed("any", obstacle)])
    process = process_of(args.pid)
    version = routes.version_of(process.python)
    if version is None:
        raise SpecmeterError(f"{process.python} does not run.", exit=Exit.ENVIRONMENT)
    open_routes, closed = _sort_out(args.how, process, version, facts)
    if not open_routes:
        raise _refused(args.pid, closed)
    link = _make_link(args, process)
    try:
        route = _enter(args, link, process, open_routes, closed)
    except BaseException:
        remove_link(link)
        raise
    return _done(args, link, route)


def _sort_out(
    how: str, process: Process, version: tuple[int, int], facts: obstacles.Facts
) -> tuple[list[str], list[Closed]]:
    wanted = routes.ROUTES if how == "auto" else (how,)
    found = {
        "remote-exec": lambda: routes.closed_remote_exec(process, version, facts),
        "gdb": lambda: routes.closed_gdb(version, facts),
    }
    answers = {route: found[route]() for route in wanted}
    closed = [Closed(route, obstacle) for route, obstacle in answers.items() if obstacle is not None]
    return [route for route, obstacle in answers.items() if obstacle is None], closed


def _make_link(args: argparse.Namespace, process: Process) -> Link:
    planned = survey(Path(process.python), args.engine, args.recipe, process.env, first=process.first)
    missing = [item for item in planned.plan["refused"] if item["required"]]
    if missing:
        raise missing_points(planned.plan, missing)
    command = [Path(process.argv[0]).name] if process.argv else []
    return make_link(planned.plan, planned.code, link_id=args.link, command=command, capacity=args.records)


def _enter(args: argparse.Namespace, link: Link, process: Process, open_routes: list[str], closed: list[Closed]) -> str:
    """Try the open routes in order; the one that got the runtime in."""
    starter, answer = routes.prepare(link, process.pid, process.python)
    for route in open_routes:
        if route == "gdb":
            obstacle = routes.by_gdb(process.pid, link.path / "attach.py")
        else:
            obstacle = routes.by_remote_exec(process, starter)
        if obstacle is not None:
            closed.append(Closed(route, obstacle))
            continue
        said = routes.wait_for_answer(answer, args.timeout)
        if said == "":
            return route
        if said is None:
            raise SpecmeterError(
                f"Process {process.pid} did not run what was queued within {args.timeout:g} s.",
                "Its main thread is inside one long call, as that of an idle server may be; what is queued finds no "
                "link any more and does nothing.",
                "Send it a short request first, so that it comes out of that call, and attach meanwhile; or give a "
                "longer --timeout.",
                Exit.SERVER_FAILED,
            )
        raise SpecmeterError(f"Process {process.pid} refused the runtime.", f"{said}.", exit=Exit.REFUSED)
    raise _refused(process.pid, closed)


def _done(args: argparse.Namespace, link: Link, route: str) -> int:
    if args.armed:
        arm(link, sampling=sampling_for(args, "it was not measured"), nvtx=args.nvtx)
    found = [process for process in processes(link, alive_only=True) if process.pid == args.pid]
    result: dict[str, Any] = {"pid": args.pid, "route": route, "link": link.id, "path": str(link.path)}
    result["points"] = len(found[0].report["points"]) if found else 0
    result["refused"] = found[0].report["refused"] if found else []
    if args.json:
        document = {"schema": "specmeter/attach/1", "version": __version__, "command": "attach", "result": result}
        print(json.dumps({**document, "warnings": []}))
        return int(Exit.DONE)
    state = "armed" if args.armed else "dormant"
    print(
        f"process {args.pid} carries the runtime ({state}), by {route}; link {link.id}, {result['points']} points ready"
    )
    if not found:
        print("  it has imported no module of the plan yet")
    for entry in result["refused"]:
        print(f"  refused: {entry['module']}: {entry['reason']}")
    return int(Exit.DONE)


def _refused(pid: int, closed: list[Closed]) -> SpecmeterError:
    lines = [f"{item.route}: {item.obstacle.why}. {item.obstacle.fix}" for item in closed]
    return SpecmeterError(
        f"Process {pid} cannot be attached to.",
        "\n        ".join(lines),
        "A server started by `specmeter run` needs none of this; `specmeter patch` reaches what nothing else does.",
        Exit.REFUSED,
    )
