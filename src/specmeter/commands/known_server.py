"""What a server's command and its requests tell for the reasons of verify's cost: the model's shape and the context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from specmeter.analysis.costmodel_bytes import Shape, read_shape
from specmeter.analysis.verify_sides import Server
from specmeter.commands.model_folders import models_of
from specmeter.errors import SpecmeterError
from specmeter.trace import Request
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns


def known_server(engine: str, command: Sequence[str], requests: Iterable[Request]) -> Server:
    """The target's shape where its config is here, and the mean context halfway through the answers."""
    name = "embedded" if engine == "specmeter" else engine  # a plan has the recipe's name
    target = models_of(name, command)[0] if command else None
    shape: Shape | None = None
    if target and (Path(target) / "config.json").is_file():
        with suppress(SpecmeterError):
            shape = read_shape(Path(target))
    lengths = [r.prompt_tokens + r.output_tokens / 2 for r in requests if not r.error]
    return Server(shape, context=sum(lengths) / len(lengths) if lengths else None)


def known_of(run: Run) -> Server:
    """The same from a saved run."""
    command, table = run.run.get("server"), run.requests
    requests = [Request("", "", "", 0, 0, 0, 0, int(p), int(o), str(e)) for p, o, e in _lengths(table)]
    return known_server(str(run.plan.get("engine") or ""), command if isinstance(command, list) else (), requests)


def _lengths(table: Columns) -> Iterable[tuple[int, int, str]]:
    return zip(table["prompt_tokens"], table["output_tokens"], table["error"], strict=True) if table else ()
