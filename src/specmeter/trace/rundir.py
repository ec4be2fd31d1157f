"""Run directories: everything about one run, written so that a crash leaves no half-written file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.kept_runs import note_run
from specmeter.trace.build import Trace
from specmeter.trace.environment import measured_environment
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.regular import read_regular
from specmeter.trace.requests import Request
from specmeter.trace.shape import check_document, damaged
from specmeter.trace.sparse import copy_sparse
from specmeter.trace.strict_json import parse_json
from specmeter.trace.tables import Columns, cycle_columns, read_table, request_columns, span_columns, write_table
from specmeter.trace.whole import NotSaved, whole

RUN_SCHEMA = "specmeter/run/1"
_KNOWN = ("specmeter/analysis/1", "specmeter/check/1", RUN_SCHEMA)
RUNS = "specmeter-runs"
_AGAIN = "Copy the run again from where it was recorded, or record it anew."


@dataclass(frozen=True)
class Run:
    """A saved run. Tables are dicts of numpy columns, empty where the run has none; documents likewise."""

    path: Path
    run: dict[str, Any]
    plan: dict[str, Any]
    analysis: dict[str, Any]
    report: str

    @property
    def cycles(self) -> Columns:
        """cycles.parquet or .npz."""
        return read_table(self.path, "cycles")

    @property
    def spans(self) -> Columns:
        """spans.parquet or .npz."""
        return read_table(self.path, "spans")

    @property
    def requests(self) -> Columns:
        """requests.parquet or .npz."""
        return read_table(self.path, "requests")

    @property
    def wiring(self) -> dict[str, Any]:
        """wiring.json: the result of the wiring check that was made beside the measurement."""
        found = _read_json(self.path / "wiring.json").get("result")
        return found if isinstance(found, dict) else {}

    @property
    def children(self) -> dict[str, Run]:
        """The runs below this one (arms, trials, starts) by name."""
        folder = self.path / "children"
        return {p.name: load(p) for p in sorted(folder.iterdir()) if p.is_dir()} if folder.is_dir() else {}


class RunWriter:
    """Writes one run directory; ``path`` is the directory (0700) and ``logs`` its folder for logs.

    Every write raises NotSaved, and leaves nothing half-written, where the disk does not take it. ``failure`` is the
    first of them that was postponed.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.failure: NotSaved | None = None
        self.logs = path / "logs"
        self.logs.mkdir(mode=0o700)
        self._facts = dict(facts)
        self._write_run("partial")

    @classmethod
    def create(cls, out: Path | None, command: Sequence[str], **facts: Any) -> RunWriter:
        """Make a new run directory: ``out``, or a fresh one below ./specmeter-runs.

        ``facts`` go into run.json (``env`` masked; without it, what of this process's a measurement depends on).
        Raises SpecmeterError if ``out`` exists and is not empty.
        """
        if out is None:
            stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
            out = Path(RUNS) / f"{stamp}-{secrets.token_hex(3)}"
        try:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise SpecmeterError(
                    f"{out} already exists", "A run is never written over.", "Name another directory with --out."
                )
            out.mkdir(mode=0o700, parents=True, exist_ok=True)
            out.chmod(0o700)
        except OSError as error:
            raise SpecmeterError(
                f"{out} cannot be made", str(error.strerror), "Name a writable directory with --out.", Exit.ENVIRONMENT
            ) from error
        note_run(out)
        facts["env"] = mask_env(facts["env"] if "env" in facts else measured_environment())
        return cls(out, {"id": out.name, "command": mask_command(command), **facts})

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write plan.json."""
        write_json(self.path / "plan.json", plan)

    def save_rings(self, link_dir: Path) -> None:
        """Copy a link's rings and process states into rings/."""
        folder = self.path / "rings"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise NotSaved.into(self.path, error) from error
        for source in sorted([*link_dir.glob("*-*.ring"), *link_dir.glob("*-*.json")]):
            with whole(folder / source.name, folder / f".{source.name}.part") as part:
                copy_sparse(source, part)

    def write_trace(self, trace: Trace) -> None:
        """Write the tables of cycles and spans."""
        write_table(self.path, "cycles", cycle_columns(trace))
        write_table(self.path, "spans", span_columns(trace))

    def write_requests(self, requests: Sequence[Request]) -> None:
        """Write the table of requests."""
        write_table(self.path, "requests", request_columns(requests))

    def write_analysis(self, document: Mapping[str, Any]) -> None:
        """Write analysis.json."""
        write_json(self.path / "analysis.json", document)

    def write_wiring(self, document: Mapping[str, Any]) -> None:
        """Write wiring.json, as `specmeter check --json` prints it."""
        write_json(self.path / "wiring.json", document)

    def write_report(self, text: str) -> None:
        """Write report.txt."""
        _write(self.path / "report.txt", text)

    def child(self, name: str, **facts: Any) -> RunWriter:
        """Make the run directory of one arm, trial or start below this one."""
        safe = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in name).lstrip(".") or "_"
        folder = self.path / "children"
        folder.mkdir(mode=0o700, exist_ok=True)
        return RunWriter.create(folder / safe, self._facts["command"], **facts)

    def keep(self, trace: Trace | None = None, requests: Sequence[Request] | None = None) -> None:
        """Write the tables of what was measured, each on its own, postponing what fails."""
        if trace is not None:
            with self.postponing():
                self.write_trace(trace)
        if requests is not None:
            with self.postponing():
                self.write_requests(requests)

    def keep_analysis(self, document: Mapping[str, Any], report: str) -> None:
        """Write the analysis and its text, each on its own, postponing what fails."""
        with self.postponing():
            self.write_analysis(document)
        with self.postponing():
            self.write_report(report)

    @contextmanager
    def postponing(self) -> Iterator[None]:
        """A write inside that fails is kept in ``failure``: what was measured can still be printed before it is told.

        A run with a failure is never marked complete.
        """
        try:
            yield
        except NotSaved as error:
            self.failure = self.failure or error

    def add_facts(self, **facts: Any) -> None:
        """More for run.json, written with ``finish``."""
        self._facts.update(facts)

    def finish(self, status: str = "complete") -> None:
        """Say in run.json that the run is whole; it stays ``partial`` where a write has failed.

        A folder for logs in which there is none is removed.
        """
        with contextlib.suppress(OSError):
            self.logs.rmdir()
        if self.failure is None:
            self._write_run(status)

    def raise_failure(self) -> None:
        """Raise the write that was postponed, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _write_run(self, status: str) -> None:
        machine = {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()}
        self._facts.setdefault("created_ns", time.time_ns())
        head = {"schema": RUN_SCHEMA, "version": __version__, "status": status, "machine": machine}
        write_json(self.path / "run.json", {**head, **self._facts})


def load(path: Path | str) -> Run:
    """Read a run directory. Raises SpecmeterError when it is none, or of an unknown schema."""
    folder = Path(path)
    run = _read_json(folder / "run.json")
    if not run:
        raise SpecmeterError(
            f"{folder} is no run directory", "It holds no run.json.", "Name a directory that --out made."
        )
    return Run(
        folder,
        run,
        _read_json(folder / "plan.json"),
        _read_json(folder / "analysis.json"),
        _read_text(folder / "report.txt"),
    )


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all, 0600; NaN and infinity are refused."""
    _write(path, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    with whole(path, path.with_name(f".{path.name}.part")) as part:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)


def _read_text(path: Path) -> str:
    """The text of a file, empty where the run has none."""
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SpecmeterError(f"{path} cannot be read", str(error.strerror or error), _AGAIN) from error
    except UnicodeDecodeError as error:
        raise damaged(str(path), f"It is no UTF-8 text: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if not text and not path.exists():
        return {}
    try:
        document = parse_json(text)
    except ValueError as error:
        raise damaged(str(path), f"It is no JSON document: {error}.") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if path.name != "plan.json" and schema not in _KNOWN:
        raise SpecmeterError(
            f"{path} has the unknown schema {schema!r}",
            f"This specmeter reads {', '.join(_KNOWN)}.",
            "Read it with the specmeter version that wrote it.",
        )
    return check_document(path, document)
