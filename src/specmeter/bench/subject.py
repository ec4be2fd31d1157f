"""From a command line to the server it names: `-- CMD`, `--url` with `--link`, or the embedded engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specmeter.bench.session import Subject
from specmeter.engines import ENGINE_NAMES, ServerSpec, engine_named
from specmeter.errors import SpecmeterError


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which server to measure."""
    group = parser.add_argument_group("server", "Without any of these, the embedded engine is started.")
    group.add_argument("--engine", choices=ENGINE_NAMES, help="the server's engine, when CMD does not show it")
    group.add_argument("--url", help="a running server; with --link, since it must carry the runtime")
    group.add_argument("--link", metavar="ID", help="link of a running server that `specmeter run` started")
    group.add_argument("--python", type=Path, metavar="EXE", help="the server's interpreter, when CMD hides it")
    group.add_argument("--recipe", type=Path, metavar="FILE", help="your own recipe instead of the built-in one")
    group.add_argument("--model-name", metavar="NAME", help="the model to ask for, when the server has several")
    group.add_argument("--start-timeout", type=float, metavar="S", help="seconds until a start is given up")
    own = parser.add_argument_group("embedded engine")
    own.add_argument("--model", type=Path, metavar="DIR", help="a Llama-family model (default: fetched)")
    own.add_argument("--draft", metavar="DIR", help="an EAGLE-3 head (default: the one that comes along)")
    own.add_argument("--threads", type=int, metavar="N", help="compute threads")
    parser.add_argument("cmd", nargs=argparse.REMAINDER, metavar="-- CMD", help="the server's command line")


def subject_of(args: argparse.Namespace) -> Subject:
    """The server that the arguments name. Raises SpecmeterError when they contradict each other."""
    command = _words(args.cmd)
    if command and (args.url or args.link):
        raise SpecmeterError("Both a command and a running server are given.", next_step="Leave one of them out.")
    if bool(args.url) != bool(args.link):
        raise SpecmeterError(
            "A running server needs both --url and --link.",
            "Its records are found by the link, and the load goes to the URL.",
            "Start it with `specmeter run --link ID -- CMD`, then give --link ID --url URL.",
        )
    if not command and not args.url:
        command = _embedded_command(args)
    elif args.model or args.draft or args.threads:
        raise SpecmeterError(
            "--model, --draft and --threads belong to the embedded engine.", next_step="Put them into CMD."
        )
    name = args.engine or ("embedded" if not command else engine_in(command))
    spec = ServerSpec(name, tuple(command), url=args.url, link=args.link)
    return Subject(engine_named(name), spec, args.python, args.recipe, args.model_name, args.start_timeout)


def engine_in(command: Sequence[str]) -> str:
    """The engine that a command starts, by the names in its first words."""
    head = " ".join(Path(word).name if "/" in word else word for word in command[:4])
    for needle, name in (("vllm", "vllm"), ("sglang", "sglang"), ("specmeter", "embedded")):
        if needle in head:
            return name
    raise SpecmeterError(
        "The command does not show which engine it starts.",
        f"Its first words are: {head}",
        f"Give --engine {'|'.join(ENGINE_NAMES)}.",
    )


def _words(words: Sequence[str]) -> list[str]:
    if words and words[0] != "--":
        raise SpecmeterError(f"Unexpected argument {words[0]!r}.", "The server's command comes after `--`.")
    return list(words[1:])


def _embedded_command(args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "specmeter", "serve"]
    for flag, value in (("--model", args.model), ("--draft", args.draft), ("--threads", args.threads)):
        if value is not None:
            command += [flag, str(value)]
    return command
