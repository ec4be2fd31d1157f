"""From a server's command line to a link that is ready for it: interpreter, plan, code, directory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from specmeter.control.launch import first_on_path, interpreter_of
from specmeter.control.link import Link, make_link
from specmeter.recipes.planner import build_plan


def prepare_link(
    command: Sequence[str],
    *,
    engine: str | None = None,
    python: Path | None = None,
    recipe: Path | None = None,
    link_id: str | None = None,
    base: Path | None = None,
    armed: bool = False,
    capacity: int | None = None,
    device_events: bool | str = False,
    device_stamps: bool = False,
    mix: Mapping[str, Any] | None = None,
    nvtx: bool = False,
    env: Mapping[str, str] | None = None,
    knobs: Sequence[str] = (),
    only: Collection[str] | None = None,
) -> Link:
    """Plan for the interpreter of ``command`` (or ``python``) and make the link. Raises SpecmeterError.

    ``knobs`` are those of the recipe to open; ``only`` the points to take, instead of all.
    """
    environment = dict(os.environ if env is None else env)
    interpreter = python or interpreter_of(command, environment)
    first = first_on_path(command, environment, str(Path.cwd()))
    planned = build_plan(interpreter, engine, recipe, env=environment, knobs=knobs, only=only, first=first)
    return make_link(
        planned.plan,
        planned.code,
        link_id=link_id,
        base=base,
        # The program alone: arguments may hold keys.
        command=[Path(command[0]).name] if command else [],
        armed=armed,
        capacity=capacity,
        device_events=device_events,
        device_stamps=device_stamps,
        mix=mix,
        nvtx=nvtx,
    )
