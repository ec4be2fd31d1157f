"""Plain decoding that another run measured: whether its server is the same build, so that verify's line may use it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from specmeter.analysis.costmodel_data import has_plain
from specmeter.analysis.pooling import check_pool, differences, facts_of
from specmeter.commands.explain_commands import server_engine
from specmeter.commands.recorded import recorded, without_places
from specmeter.engines import ENGINE_NAMES, Setting, engine_named
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import Run, load

_CHOICES = (None, "", "auto", "none")


def plain_start(runs: Sequence[Run], named: str | None, pool: bool = False) -> tuple[Run | None, list[str]]:
    """The run whose plain decoding goes with ``runs``, and what to say where there is one that cannot be used.

    ``named`` is --baseline's folder; without it the folder that the first run itself was profiled with counts. Raises
    SpecmeterError for a folder that was named and holds no plain cycles, or another server's (unless ``pool``).
    """
    if any(has_plain(run) for run in runs):
        said = f"{named} is not used: plain decoding was measured in the run itself" if named else ""
        return None, [said] if said else []
    saved = recorded(runs[0]).options.get("baseline")
    folder = named or (None if saved in _CHOICES else str(saved))
    if folder is None:
        return None, []
    try:
        found = load(Path(folder))
        if not has_plain(found):
            raise SpecmeterError(f"{folder} holds no cycles of plain decoding.", "", "Name a run that measured it.")
        facts = [build_of(runs[0]), build_of(found)]
        if named:
            check_pool([runs[0], found], facts, pool)
        else:
            apart = differences([runs[0], found], facts)
            if apart:
                raise SpecmeterError(f"{folder} ran on another server: {'; '.join(apart)}.")
    except SpecmeterError as error:
        if named:
            raise
        return None, [f"the baseline's cycles are not used for verify's width: {error.what}"]
    return found, []


def build_of(run: Run) -> dict[str, str | None]:
    """What makes one server build and machine of a run, its speculation left out, by name; None where not recorded."""
    engine, words = server_engine(run), tuple(str(word) for word in run.run.get("server") or recorded(run).words)
    if words and engine in ENGINE_NAMES:
        with contextlib.suppress(SpecmeterError):
            words = engine_named(engine).with_setting(words, Setting.of(0))
    stated = {name: json.dumps(run.run.get(name), sort_keys=True) for name in ("versions", "server_env")}
    return {
        **facts_of(run),
        "server command": shlex.join(without_places(words)) or None,
        "packages": stated["versions"] if run.run.get("versions") else None,
        "server environment": stated["server_env"] if "server_env" in run.run else None,
    }
