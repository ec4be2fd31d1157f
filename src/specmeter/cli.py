"""The ``specmeter`` command: picks the subcommand, prints errors plainly, returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from specmeter import __version__
from specmeter.commands import ENTRIES
from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.dispatch import FROM_HERE, run_on_hosts, take_hosts
from specmeter.kept_runs import forget_runs, kept_words, tidy_runs
from specmeter.reporters.inert import inert_lines

DESCRIPTION = """\
specmeter shows where each millisecond of a speculative decoding cycle goes, says why speculation wins or loses
against plain decoding, and finds the settings that win, on the server where the model runs.
"""

# What a full or failing disk answers a write with: of the environment, wherever it comes up.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


class _Parser(argparse.ArgumentParser):
    """Reports a usage mistake as a SpecmeterError, so that --json output covers it too."""

    def error(self, message: str) -> None:  # type: ignore[override]
        command = self.prog.partition(" ")[2]
        what = f"{command}: {message}" if command else message
        raise SpecmeterError(what, next_step=f"Run `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but what a subcommand does not know is its own error: the whole parser's help says nothing."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The whole parser; only the ``chosen`` command's module is imported."""
    parser = _Parser(prog="specmeter", description=DESCRIPTION)
    parser.add_argument(
        "--on", metavar="HOST", help="run it there: ssh://user@host, or an exec prefix; may be repeated"
    )
    parser.add_argument("--far-python", metavar="EXE", help="the Python of --on that runs specmeter there (python3)")
    parser.add_argument("--version", action="version", version=f"specmeter {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    for entry in ENTRIES:
        sub = commands.add_parser(entry.name, help=entry.help, description=entry.help)
        if entry.name == chosen:
            with _interrupt_waits():
                command = entry.load()
            command.prepare_parser(sub)
    return parser


@contextlib.contextmanager
def _interrupt_waits() -> Iterator[None]:
    """Ctrl-C while packages are imported comes after it: some turn it into an ImportError of their own."""
    came: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    except ValueError:  # not in the main thread: no handler of ours
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in own
    forget_runs()
    try:
        hosts, python, arguments = take_hosts(arguments)
        chosen = next((word for word in arguments if not word.startswith("-")), None)
        if hosts and chosen is not None and "--help" not in own and chosen not in FROM_HERE:
            code = run_on_hosts(hosts, python, arguments)
        else:
            code = _run(arguments, chosen, hosts, python)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a disk that is full is an error with a reason
        return code
    except SpecmeterError as error:
        tidy_runs()
        _print_error(error, chosen, as_json)
        return int(error.exit)
    except KeyboardInterrupt:
        kept = kept_words(tidy_runs())
        print(inert_lines(f"interrupted; {kept}" if kept else "interrupted"), file=sys.stderr)
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): not a fault, but nothing more can be printed.
        _drop_output()
        return int(Exit.DONE)
    except Exception as error:
        failure = _explained(error)
        _print_error(failure, chosen, as_json and failure.exit is Exit.INTERNAL)
        return int(failure.exit)


def _explained(error: Exception) -> SpecmeterError:
    """An exception that no command expects, as the user's error: a disk that is full, else a fault of ours."""
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        _drop_output()
        place = f" to {error.filename}" if error.filename else ""
        return SpecmeterError(
            f"The output could not be written{place}.",
            f"{error.strerror}.",
            "Make room, or write elsewhere. A run that was saved before is whole: `specmeter report DIR` prints it.",
            Exit.ENVIRONMENT,
        )
    return SpecmeterError(
        "specmeter failed: this is a fault of ours, not of your input.",
        why=f"The traceback is in {_write_crash_log()}",
        next_step="Please report it with that file.",
        exit=Exit.INTERNAL,
    )


def _drop_output() -> None:
    """Nothing more reaches standard output, so that the interpreter does not try again at its end."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str], chosen: str | None, hosts: Sequence[str], python: str) -> int:
    if chosen is not None and arguments[0] == chosen:
        _check_name(chosen)
    parser = build_parser(chosen)
    args = parser.parse_args(arguments)
    args.on, args.far_python = tuple(hosts), python
    if args.command is None:
        parser.print_help()
        return int(Exit.USAGE)
    entry = next(entry for entry in ENTRIES if entry.name == args.command)
    return entry.load().run(args)


def _check_name(name: str) -> None:
    """Raise SpecmeterError for a command that there is not, with those whose names are near."""
    names = [entry.name for entry in ENTRIES]
    if name in names:
        return
    near = difflib.get_close_matches(name, names, 2, 0.6)
    meant = f"Did you mean {' or '.join(f'`specmeter {word}`' for word in near)}? " if near else ""
    raise SpecmeterError(f"There is no command {name!r}.", next_step=f"{meant}`specmeter --help` lists all.")


def _print_error(error: SpecmeterError, command: str | None, as_json: bool) -> None:
    if as_json:
        document = {
            "schema": "specmeter/error/1",
            "version": __version__,
            "command": command,
            "error": error.as_json(),
        }
        try:
            print(json.dumps(document), flush=True)
        except OSError:
            _drop_output()
    # Its words may be a server's, a file's or another host's.
    with contextlib.suppress(OSError):  # both outputs may lie on the same full disk
        print(inert_lines(f"specmeter: {error}"), file=sys.stderr, flush=True)


def _write_crash_log() -> str:
    try:
        handle, path = tempfile.mkstemp(prefix="specmeter-crash-", suffix=".log")
    except OSError:  # no folder can be written to
        traceback.print_exc()
        return "the lines above"
    with os.fdopen(handle, "w") as log:
        traceback.print_exc(file=log)
    return path
