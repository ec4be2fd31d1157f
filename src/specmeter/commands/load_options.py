"""What the commands that drive a server have in common: options, the default server, JSON output."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.bench.place import HERE, Place
from specmeter.bench.prompts import PromptSet, load_prompts
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Probing, with_engine
from specmeter.commands.device_options import add_device_arguments, device_of
from specmeter.eagle.settings import SpecSettings
from specmeter.engines import ServerSpec, Setting
from specmeter.engines.spec import add_server_arguments, server_spec
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.html import save_page
from specmeter.reporters.inert import inert_lines
from specmeter.reporters.terminal import print_analysis
from specmeter.trace.rundir import RunWriter

# No engine's limit, but far beyond any use: a slip of the finger, found before a server is started.
MOST_STEPS = 64
MOST_REQUESTS = 1_000_000
# Whole numbers up to here are exact in every reader of JSON (RFC 8259, section 6).
MOST_SEED = 1 << 53


def add_load_arguments(parser: argparse.ArgumentParser, requests: int, max_tokens: int) -> None:
    """Prompts, how many and how long; and the server grammar."""
    group = parser.add_argument_group("load")
    group.add_argument("--prompts", metavar="FILE", help="JSONL, ShareGPT or OpenAI messages (default: built in)")
    group.add_argument("--kind", action="append", default=[], metavar="KIND", help="only prompts of this kind")
    group.add_argument("--requests", type=int, default=requests, metavar="N", help=f"prompts (default: {requests})")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"(default: {max_tokens})")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of order and sampling (default: 0)")
    group.add_argument("--honour-eos", action="store_true", help="let answers end by themselves")
    add_server_arguments(parser)
    own = parser.add_argument_group("the embedded engine, where no server is named")
    own.add_argument("--model", metavar="DIR", help="a Llama-family directory (default: fetched)")
    own.add_argument("--draft", metavar="DIR", help="an EAGLE-3 head (default: the packaged one)")
    own.add_argument("--threads", type=int, metavar="N", help="compute threads")


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the plan is made, and where the run goes."""
    parser.add_argument("--python", type=Path, metavar="EXE", help="the server's interpreter")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="your own recipe")
    add_device_arguments(parser)
    parser.add_argument("--start-timeout", type=float, metavar="S", help="seconds to wait for a healthy server")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run directory (default: ./specmeter-runs/...)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def chosen_prompts(args: argparse.Namespace) -> PromptSet:
    """The prompt set; it and every number of the load's options are checked before anything is started."""
    if not 1 <= args.requests <= MOST_REQUESTS:
        raise SpecmeterError(f"--requests is {args.requests}; it must be 1 or more, {MOST_REQUESTS} at most.")
    if abs(args.seed) > MOST_SEED:
        raise SpecmeterError(
            f"--seed {str(args.seed)[:12]}... is too large.", "Beyond 2^53 not every reader of a run gets it whole."
        )
    if args.max_tokens < 2:
        raise SpecmeterError(f"--max-tokens is {args.max_tokens}; a decode rate needs 2 or more.")
    if not 0 <= args.temperature < math.inf:
        raise SpecmeterError(f"--temperature is {args.temperature}.", "It must be 0 (greedy) or a number above.")
    timeout = getattr(args, "start_timeout", None)
    if timeout is not None and not 0 < timeout < math.inf:
        raise SpecmeterError(f"--start-timeout is {timeout}.", "It must be a number of seconds above 0.")
    return load_prompts(args.prompts, args.kind)


def check_settings(spec: ServerSpec, settings: Iterable[Setting]) -> None:
    """Raise SpecmeterError for a setting that the server's engine cannot run, before it is started."""
    for setting in settings:
        if spec.engine == "embedded":
            SpecSettings(setting.steps, setting.topk, setting.draft_tokens if setting.steps else None)
        elif setting.steps > MOST_STEPS:
            raise SpecmeterError(f"{setting.label} has {setting.steps} draft steps.", f"{MOST_STEPS} are the most.")


def sending(args: argparse.Namespace) -> Sending:
    """How every request is sent."""
    return Sending(args.max_tokens, args.temperature, args.seed, not args.honour_eos)


def probing(args: argparse.Namespace, probes: bool = True, place: Place = HERE) -> Probing:
    """How the server is probed, and where."""
    return Probing(args.python, args.recipe, probes, args.model_name, args.start_timeout, place, device_of(args))


def default_command(args: argparse.Namespace) -> list[str]:
    """``specmeter serve`` of this very installation."""
    command = [sys.executable, "-m", "specmeter", "serve"]
    for name in ("model", "draft", "threads"):
        value = getattr(args, name)
        if value is not None:
            command += [f"--{name}", str(value)]
    return command


def chosen_server(args: argparse.Namespace, place: Place = HERE) -> ServerSpec:
    """The server that the arguments name; the embedded engine (its model fetched first) if they name none.

    On another host there is no such default: Raises SpecmeterError then, as for arguments that do not fit.
    """
    named = bool(args.url or args.link or args.server or args.server_command)
    if place.names and not named:
        raise SpecmeterError(
            f"No server is named for {place.names[0]}.",
            "The embedded engine is not sent there: it needs torch, and specmeter installs nothing on a host.",
            "Give `-- CMD` with the command that starts a server there, or --url and --link of one that runs.",
        )
    if named and (args.model or args.draft or args.threads):
        raise SpecmeterError(
            "--model, --draft and --threads are for the embedded engine.",
            "Another server is named.",
            "Put them into its own command line.",
        )
    spec = server_spec(args, default_command(args))
    if place.names and spec.api_key_env is not None:
        raise SpecmeterError(
            "--api-key-env does not go with --on yet.", "The load generator on a host is given no key.",
            "Reach the server from here with --url.",
        )  # fmt: skip
    if not named and args.model is None:
        _fetch_model()
    return with_engine(spec, place)


def _fetch_model() -> None:
    try:
        from specmeter.commands.fetch import ProgressLine
        from specmeter.eagle.model_store import ensure_model
    except ImportError:
        return  # the server itself says what is missing
    ensure_model(progress=ProgressLine())


def print_json(command: str, result: dict[str, Any], warnings: list[str], run_dir: Path | None) -> None:
    """One JSON document on standard output."""
    document = {
        "schema": f"specmeter/{command}/1",
        "version": __version__,
        "command": command,
        "result": result,
        "run_dir": os.fspath(run_dir) if run_dir is not None else None,
        "warnings": warnings,
    }
    print(json.dumps(document, allow_nan=False))


def print_saved(command: str, result: dict[str, Any], warnings: list[str], writer: RunWriter) -> int:
    """The JSON document of a finished run, and the exit code: 5 where it could not be saved whole, which is a warning.

    The result is printed either way, since it was measured.
    """
    failure = writer.failure
    print_json(command, result, [*warnings, *([str(failure)] if failure else [])], writer.path)
    if failure is None:
        return int(Exit.DONE)
    print(inert_lines(f"specmeter: {failure}"), file=sys.stderr)
    return int(failure.exit)


def show_saved(command: str, document: dict[str, Any], warnings: list[str], writer: RunWriter, as_json: bool) -> int:
    """The end of a command whose run holds one document: its page is written, its report printed, its place named.

    Returns the exit code. Raises SpecmeterError after the report where the run could not be saved whole.
    """
    page = save_page(writer.path) if writer.failure is None else None
    if as_json:
        return print_saved(command, document, warnings, writer)
    print_analysis(document)
    for warning in warnings:
        print(f"note: {warning}")
    writer.raise_failure()
    print(f"saved: {writer.path}" + (f", page: {page}" if page else ""))
    return int(Exit.DONE)
