"""``specmeter patch plan|apply|status|restore``: a few lines on disk, for servers that nothing else reaches."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.patch import client
from specmeter.recipes.planner import Planned, missing_points, survey

_KINDS = {
    "clean": "not patched",
    "unfinished": "unfinished: the file is the original, a folder is left; restore tidies it up",
    "original": "unfinished: the file is the original, a folder is left; restore tidies it up",
    "applied": "patched",
    "changed": "patched, then changed by somebody else",
    "gone": "patched, then removed by somebody else",
    "no-backup": "holds the lines of a patch, but its backup is not there",
    "damaged": "patched, but its manifest cannot be read",
    "unreadable": "cannot be read",
}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the four subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    plan = actions.add_parser("plan", help="show which file would take which lines; change nothing")
    apply = actions.add_parser("apply", help="back the file up, check and exchange it, make a link")
    for sub in (plan, apply):
        sub.add_argument("--python", type=Path, metavar="EXE", help="the interpreter that runs the server (this one)")
        sub.add_argument("--engine", metavar="NAME[==V]", help="sglang, vllm or specmeter; otherwise the one installed")
        sub.add_argument("--recipe", type=Path, action="append", metavar="F", help="a recipe of your own")
    apply.add_argument("--link", metavar="ID", help="id of the link to make")
    apply.add_argument("--armed", action="store_true", help="probes are in from the first import on")
    apply.add_argument("--records", type=int, metavar="N", help="records a process keeps (32 bytes each)")
    status = actions.add_parser("status", help="what is patched, whole, unfinished or changed since; 1 if anything is")
    restore = actions.add_parser("restore", help="put the very bytes back; refused where somebody else changed them")
    restore.add_argument("--all", action="store_true", help="every file that this user has patched")
    restore.add_argument(
        "--keep-changes", action="store_true", help="take our lines alone out of a file that somebody changed since"
    )
    for sub in (status, restore):
        sub.add_argument("file", nargs="*", metavar="FILE", help="a patched file; otherwise those of this user's list")
    for sub in (plan, apply, status, restore):
        sub.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Do one of the four."""
    actions = {"plan": _plan, "apply": _apply, "status": _status, "restore": _restore}
    return actions[args.action](args)


def _survey(args: argparse.Namespace, with_code: bool) -> tuple[Planned, Path]:
    python = args.python or Path(sys.executable)
    return survey(python, args.engine, args.recipe, with_code=with_code), python


def _plan(args: argparse.Namespace) -> int:
    planned, python = _survey(args, False)
    targets, unreached = client.targets_of(planned.plan, python)
    missing = [item for item in planned.plan["refused"] if item["required"]]
    refused = [target for target in targets if "refused" in target.preview]
    code = Exit.FINDING if missing or refused or unreached or not targets else Exit.DONE
    files = [{**target.preview, "modules": list(target.modules)} for target in targets]
    result = {"engine": planned.plan["engine"], "engine_version": planned.plan["engine_version"], "files": files}
    if args.json:
        _print_json("patch plan", {**result, "unreached": unreached, "required_missing": missing})
        return int(code)
    print(f"{result['engine']} {result['engine_version']}, {len(planned.plan['points'])} places")
    for target in targets:
        _print_target(target)
    for module, why in unreached.items():
        print(f"not reached: {module}: {why}")
    if missing:
        print(f"{len(missing)} required points are missing: `specmeter plan` shows them")
    return int(code)


def _print_target(target: client.Target) -> None:
    preview = target.preview
    digest = f", sha256 {preview['sha256'][:16]}" if preview["sha256"] else ""
    print(f"\n{target.path}  {_KINDS[preview['kind']]}{digest}")
    print(f"  comes before {len(target.modules)} modules of the plan")
    if "facts" in preview:
        facts = preview["facts"]
        print(f"  {facts['size']} bytes, mode {facts['mode']:o}, uid {facts['uid']}, gid {facts['gid']}: kept")
    for line in preview.get("lines", "").splitlines():
        print(f"  + {line}")
    if "refused" in preview:
        refusal = client.refusal(preview["refused"])
        print(f"  refused: {refusal}")


def _apply(args: argparse.Namespace) -> int:
    if args.records is not None and args.records < 1024:
        raise SpecmeterError(f"--records {args.records} is too few", "A ring holds at least 1024 records.")
    planned, python = _survey(args, True)
    missing = [item for item in planned.plan["refused"] if item["required"]]
    if missing:
        raise missing_points(planned.plan, missing)
    done = client.apply(planned, python, link_id=args.link, armed=args.armed, capacity=args.records)
    if args.json:
        result = {"link": done.link.id, "path": str(done.link.path), "files": done.outcomes}
        _print_json("patch apply", result)
        return int(Exit.DONE)
    for path, outcome in done.outcomes.items():
        print(f"{path}: {'patched' if outcome == 'applied' else 'is patched already: nothing done'}")
    state = "made" if done.link_made else "there already"
    print(f"link {done.link.id} ({done.link.path}) {state}; servers started from now on show up in `specmeter status`")
    print(next_steps(done.link.id, list(done.outcomes), args.armed))
    return int(Exit.DONE)


def next_steps(link: str, files: list[str], armed: bool) -> str:
    """What comes after the patch: how to put the probes in, unless servers start with them, and how to undo it."""
    arm = "" if armed else f"`specmeter arm --link {link}` puts the probes in; "
    files_shown = " ".join(map(shlex.quote, files))
    return f"{arm}`specmeter patch restore {files_shown}` brings the original back"


def _status(args: argparse.Namespace) -> int:
    states = client.look(args.file)
    standing = [state for state in states if state["kind"] != "clean"]
    if args.json:
        _print_json("patch status", {"files": states})
        return int(Exit.FINDING if standing else Exit.DONE)
    for state in states if args.file else standing:
        print(f"{state['path']}: {_KINDS[state['kind']]}")
        manifest = state["manifest"]
        if manifest:
            about = f"{manifest['engine']} {manifest['engine_version']}, by {manifest['by']}, link {manifest['link']}"
            print(f"  {about}; original sha256 {manifest['original_sha256'][:16]}")
    if not standing and not args.file:
        print("Nothing is patched (by this user, as far as its list goes; name a FILE to look at it).")
    return int(Exit.FINDING if standing else Exit.DONE)


def _restore(args: argparse.Namespace) -> int:
    listed = [state for state in client.look(args.file) if args.file or state["kind"] != "clean"]
    if len(listed) > 1 and not args.file and not args.all:
        names = ", ".join(state["path"] for state in listed)
        raise SpecmeterError(f"{len(listed)} files are patched.", names, "Name the FILE, or say --all.")
    outcomes: dict[str, str] = {}
    notes: list[str] = []
    for state in listed:
        link = Path(state["manifest"]["link"]) if state["manifest"] else None
        # First: a restore that is cut short is then found by its manifest, and the link goes the next time.
        first = link is not None and state["kind"] in ("applied", "original")
        alive = _let_go(link) if link is not None and first else []
        outcomes[state["path"]] = client.restore(state["path"], keep_changes=args.keep_changes)
        if link is not None and not first:
            alive = _let_go(link)
        if link is not None and alive:
            pids = ", ".join(map(str, alive))
            out = f"`specmeter detach --link {link.name}` takes it out now"
            notes.append(f"process {pids} carries the runtime until it ends; {out}")
    if args.json:
        _print_json("patch restore", {"files": outcomes}, notes)
        return int(Exit.DONE)
    said = {
        "restored": "the original is back, byte for byte",
        "already": "is not patched: nothing done",
        "kept": "our lines are out, the other changes are kept",
    }
    for path, outcome in outcomes.items():
        print(f"{path}: {said[outcome]}")
    for note in notes:
        print(note)
    if not outcomes:
        print("Nothing is patched.")
    return int(Exit.DONE)


def _let_go(link: Path) -> list[int]:
    """Let the link of a patch go; a folder that is not ours to remove stays."""
    try:
        return client.let_go(link)
    except SpecmeterError:
        return []


def _print_json(command: str, result: dict[str, Any], warnings: list[str] | None = None) -> None:
    document = {"schema": f"specmeter/{command.replace(' ', '-')}/1", "version": __version__, "command": command}
    print(json.dumps({**document, "result": result, "warnings": warnings or []}))
