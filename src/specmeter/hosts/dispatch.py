"""Takes ``--on`` and ``--far-python`` out of a command line and runs the rest where it says."""

from __future__ import annotations

from collections.abc import Sequence

from specmeter.errors import SpecmeterError

DEFAULT_PYTHON = "python3"
# Commands that stay here and reach their servers there: the analysis is not sent.
FROM_HERE = ("profile", "bench", "sweep", "compare", "tune", "top")


def take_hosts(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The values of ``--on``, that of ``--far-python``, and the other words; words after ``--`` are the server's."""
    own = list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)
    rest: list[str] = []
    hosts: list[str] = []
    python = DEFAULT_PYTHON
    while own:
        word = own.pop(0)
        name, equals, value = word.partition("=")
        if name not in ("--on", "--far-python"):
            rest.append(word)
            continue
        if not equals:
            if not own:
                raise SpecmeterError(f"{name} needs a value.")
            value = own.pop(0)
        if name == "--on":
            hosts.append(value)
        else:
            python = value
    tail = list(arguments[arguments.index("--") :]) if "--" in arguments else []
    return hosts, python, rest + tail


def run_on_hosts(hosts: Sequence[str], python: str, arguments: Sequence[str]) -> int:
    """Run the command on each host in turn; the highest exit code. Raises SpecmeterError for the first that fails."""
    from specmeter.hosts.address import parse
    from specmeter.hosts.session import run_on

    parsed = [parse(text) for text in hosts]
    codes = []
    for host in parsed:
        if len(parsed) > 1 and "--json" not in arguments:
            print(f"== {host.name}", flush=True)
        codes.append(run_on(host, python, arguments))
    return max(codes)
