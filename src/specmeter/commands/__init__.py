"""One module a subcommand. A module is imported only when its command runs, so start-up stays quick."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast


class Command(Protocol):
    """What a command module provides at its top level."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to ``parser``."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; return an exit code. Raises SpecmeterError for a user's mistake."""


@dataclass(frozen=True)
class Entry:
    """A command's name on the command line, its module below ``specmeter.commands``, and its line in ``--help``."""

    name: str
    module: str
    help: str

    def load(self) -> Command:
        """Import the command's module."""
        return cast(Command, import_module(f"specmeter.commands.{self.module}"))


# The order is the order of --help.
ENTRIES: tuple[Entry, ...] = (
    Entry("demo", "demo", "All of it on a small model of its own, in three minutes: profile, sweep, verdict."),
    Entry("profile", "profile", "Where a cycle's time goes, accept length, break-even: does speculation pay?"),
    Entry("sweep", "sweep", "Which step count or tree is fastest, each against the baseline with an interval."),
    Entry("compare", "compare", "Two or more settings across server starts: interval, verdict, what would decide it."),
    Entry("tune", "tune", "The fastest setting for this model, machine and prompts, found in few starts and proven."),
    Entry("bench", "bench", "Load against a server, timed from outside: latency, tok/s, percentiles."),
    Entry("explain", "explain", "Why this step count: tok/s for any other, what-ifs, three actions worth trying."),
    Entry("gate", "gate", "For CI: fail when accept length, cycle or break-even got worse than a saved run."),
    Entry("fetch", "fetch", "Download the embedded engine's model into the cache, once."),
    Entry("serve", "serve", "Serve the embedded engine: an OpenAI-compatible server with EAGLE-3."),
    Entry("train", "train", "Train an EAGLE-3 head on data that the target writes itself."),
    Entry("source", "source", "Outline the file that a server's environment would import, without importing it."),
    Entry("plan", "plan", "Show what will be measured in an engine: file, line, text, and what is refused."),
    Entry("recipe", "recipe", "List, show and check recipes: which places of an engine are measured."),
    Entry("check", "check", "Check target and draft: is the head fed what it was trained on?"),
    Entry("run", "run", "Start a server with the runtime in it: dormant until armed."),
    Entry("env", "env", "Print the variables that put the runtime into a pod, unit file or shell."),
    Entry("arm", "arm", "Put the probes in, in a running server."),
    Entry("disarm", "disarm", "Take the probes out: the original code objects are back."),
    Entry("attach", "attach", "The runtime into a server that runs already, dormant until armed."),
    Entry("detach", "detach", "The runtime out again, for good."),
    Entry("status", "status", "Links and their processes: what is armed, hit, refused."),
    Entry("patch", "patch", "On disk, for servers that nothing else reaches: a few lines, a backup, a way back."),
    Entry("report", "report", "Print the report of a saved run again."),
    Entry("diff", "diff", "Two saved runs side by side: what changed, phase by phase, with intervals."),
    Entry("export", "export", "A saved run as a timeline (Chrome, Perfetto), tables (Parquet, JSON) or metrics."),
    Entry("top", "top", "Live: the cycle, tok/s and acceptance of every server that carries probes."),
    Entry("metrics", "metrics", "Live figures for Prometheus: an endpoint on this machine, or a text file."),
)
