"""``specmeter env``: the two variables of the launch route, for a pod, a unit file or a shell."""

from __future__ import annotations

import argparse
import json
import shlex

from specmeter import __version__
from specmeter.commands.link_options import add_plan_arguments, command_words, link_for
from specmeter.control.launch import site_folder
from specmeter.errors import SpecmeterError


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``env``."""
    parser.add_argument(
        "--format",
        choices=("shell", "systemd", "docker"),
        default="shell",
        help="export lines, Environment= lines, or an env file",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_plan_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Make the link, print the variables. The link stays until it is removed."""
    command = command_words(args, needed=False)
    if not command and args.python is None:
        raise SpecmeterError(
            "Which Python will the server run?", next_step="Give --python EXE, or the server's command after `--`."
        )
    link, _ = link_for(args, command)
    folder, site = str(link.path), str(site_folder())
    if args.json:
        result = {"link": link.id, "path": folder, "env": {"SPECMETER_LINK": folder, "PYTHONPATH": site}}
        document = {"schema": "specmeter/env/1", "version": __version__, "command": "env"}
        print(json.dumps({**document, "result": result, "warnings": []}))
        return 0
    for line in _lines(args.format, folder, site):
        print(line)
    return 0


def _lines(style: str, folder: str, site: str) -> list[str]:
    if style == "systemd":
        # PYTHONPATH of the unit, if it has one, has to be appended by hand.
        return [
            f'Environment="{name}={_for_systemd(value)}"'
            for name, value in (("SPECMETER_LINK", folder), ("PYTHONPATH", site))
        ]
    if style == "docker":
        # Nothing is quoted or escaped in such a file: a line is a variable.
        if "\n" in folder + site:
            raise SpecmeterError(
                "An env file cannot hold this link", f"{folder!r} has a line break.", "Set XDG_RUNTIME_DIR."
            )
        return [f"SPECMETER_LINK={folder}", f"PYTHONPATH={site}"]
    return [
        f"export SPECMETER_LINK={shlex.quote(folder)}",
        f'export PYTHONPATH={shlex.quote(site)}"${{PYTHONPATH:+:$PYTHONPATH}}"',
    ]


def _for_systemd(value: str) -> str:
    """``value`` within double quotes of a unit file: C escapes, and ``%`` begins a specifier (systemd.syntax(7))."""
    for letter, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("%", "%%")):
        value = value.replace(letter, escaped)
    return value
