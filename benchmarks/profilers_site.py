"""Copied as ``sitecustomize.py`` into the path of a profiled server: turns viztracer and cProfile on and off by signal.

Every Python of the server (spawned and forked children too) writes ``PROFILERS_OUT/PID`` and then answers three signals
with a line in it: SIGRTMIN+6 viztracer on/off (as viztracer's own ``install`` does with SIGUSR1 and SIGUSR2),
SIGRTMIN+7 cProfile on/off, SIGRTMIN+8 how many calls each has seen, and how many of those were ``execute_model``. Both
trace the thread that runs the handler, the main thread, which in vLLM is that of the engine's and the worker's loop.
"""

from __future__ import annotations

import cProfile
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

VIZTRACER, CPROFILE, COUNT = (signal.SIGRTMIN + number for number in (6, 7, 8))
ENTRIES = 200_000  # a ring of the newest calls; its default of a million only takes longer to count


class Tools:
    """The two tools of this process."""

    def __init__(self) -> None:
        from viztracer import VizTracer  # type: ignore[import-not-found]

        self.viztracer: Any = VizTracer(tracer_entries=ENTRIES, verbose=0)
        self.profile: cProfile.Profile | None = None
        self.on: dict[str, bool] = {"viztracer": False, "cprofile": False}

    def turn_viztracer(self, *_: object) -> None:
        """Start or stop viztracer."""
        self.on["viztracer"] = not self.on["viztracer"]
        if self.on["viztracer"]:
            self.viztracer.clear()
            say(viztracer=True)
            self.viztracer.start()
        else:
            self.viztracer.stop()
            say(viztracer=False)

    def turn_cprofile(self, *_: object) -> None:
        """Start or stop cProfile."""
        self.on["cprofile"] = not self.on["cprofile"]
        if self.on["cprofile"]:
            self.profile = cProfile.Profile()
            say(cprofile=True)
            self.profile.enable()
        elif self.profile is not None:
            self.profile.disable()
            say(cprofile=False)

    def count(self, *_: object) -> None:
        """Say how many calls both have seen last."""
        stats: list[Any] = self.profile.getstats() if self.profile is not None else []
        steps = sum(row.callcount for row in stats if "execute_model" in getattr(row.code, "co_name", ""))
        self.viztracer.parse()
        events = [event.get("name", "") for event in self.viztracer.data["traceEvents"]]
        say(
            cprofile_calls=sum(row.callcount for row in stats),
            cprofile_steps=steps,
            viztracer_calls=len(events),
            viztracer_steps=sum("execute_model" in name for name in events),
        )


def say(**facts: object) -> None:
    """Add a line to this process's file."""
    with Path(os.environ["PROFILERS_OUT"], str(os.getpid())).open("a") as file:
        file.write(json.dumps(facts) + "\n")


def listen() -> None:
    """Put the handlers in place, and say so."""
    tools = Tools()
    handlers: dict[int, Callable[..., None]] = {
        VIZTRACER: tools.turn_viztracer,
        CPROFILE: tools.turn_cprofile,
        COUNT: tools.count,
    }
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.register_at_fork(after_in_child=say)
    say()


if os.environ.get("PROFILERS_OUT"):
    listen()
