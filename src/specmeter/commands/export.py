"""``specmeter export DIR``: a saved run as a timeline, tables or metrics for other tools."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.exports.check import any_decode, check_format, phase_table
from specmeter.exports.chrome import Event, write_chrome
from specmeter.exports.data import write_json_export, write_parquet
from specmeter.exports.figures import run_figures
from specmeter.exports.openmetrics import openmetrics_text
from specmeter.exports.perfetto import perfetto_trace
from specmeter.exports.timeline import Timeline, build_timeline
from specmeter.exports.torch_trace import join_torch
from specmeter.reporters.inert import inert
from specmeter.trace.rundir import Run, load

ENDINGS = {
    "chrome": ".trace.json", "perfetto": ".pftrace", "parquet": "", "json": ".json", "openmetrics": ".metrics.txt",
}  # fmt: skip
MOST_SLICES = 200_000


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """The run, the format and the window."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run directory, as --out made it")
    parser.add_argument(
        "--format", choices=sorted(ENDINGS), default="chrome", help="(default: chrome, which Perfetto opens)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file, for parquet a folder (default: the run's name, in this directory)",
    )
    parser.add_argument("--cycles", metavar="A:B", help="timelines: only cycles A to before B of the leading rank")
    parser.add_argument(
        "--torch", type=Path, action="append", default=[], metavar="FILE", help="join a torch.profiler trace (chrome)"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the file, whole or not at all; nothing is written over."""
    if args.torch and args.format != "chrome":
        raise SpecmeterError("--torch joins into the Chrome format.", next_step="Leave --format out.")
    if args.cycles and args.format not in ("chrome", "perfetto"):
        raise SpecmeterError(f"--cycles has no meaning for {args.format}.", "It holds the whole run.")
    window = _window(args.cycles)
    saved = load(args.directory)
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in args.directory.resolve().name)
    out = args.out or Path(name + (ENDINGS[args.format] or "-parquet"))
    if out.exists() or out.is_symlink():
        raise SpecmeterError(f"{out} already exists", "Nothing is written over.", "Name another path with --out.")
    result, warnings = _WRITERS[args.format](saved, out, args, window)
    result = {"format": args.format, "path": str(out), **result}
    if args.json:
        head = {"schema": "specmeter/export-result/1", "version": __version__, "command": "export"}
        print(json.dumps({**head, "result": result, "warnings": warnings}, allow_nan=False))
    else:
        _say(result, warnings)
    return int(Exit.DONE)


def _window(text: str | None) -> tuple[int, int | None] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return int(first or 0), int(last) if last else None
    except ValueError:
        raise SpecmeterError(f"--cycles {inert(text)} is no range", "A range is A:B, A: or :B, from 0.") from None


def _timeline(saved: Run, window: tuple[int, int | None] | None) -> tuple[Timeline, list[str]]:
    timeline = build_timeline(saved, *(window or (0, None)))
    warnings = list(timeline.warnings)
    if window is None and timeline.slices > MOST_SLICES:
        kept = max(1, timeline.cycles * MOST_SLICES // timeline.slices)
        timeline = build_timeline(saved, 0, kept)
        warnings.append(f"the first {kept} of {timeline.cycles_total} cycles; --cycles A:B chooses others")
    return timeline, warnings


def _chrome(
    saved: Run, out: Path, args: argparse.Namespace, window: tuple[int, int | None] | None
) -> tuple[dict[str, Any], list[str]]:
    timeline, warnings = _timeline(saved, window)
    joined: list[Event] = []
    inside = 0
    for number, path in enumerate(args.torch):
        found = join_torch(path, timeline, number)
        joined += found.events
        inside += found.inside
        warnings += found.warnings
    _whole(out, lambda file: write_chrome(timeline, file, joined))
    result = _facts(timeline) | ({"torch_events": len(joined), "torch_events_in_window": inside} if args.torch else {})
    return result | _read_back(out, saved, timeline), warnings


def _read_back(out: Path, saved: Run, timeline: Timeline) -> dict[str, Any]:
    """Parse the file again; where it holds the whole run, its phases against the report's, largest difference in ms.

    A file that cannot be read back as it should be is not left there.
    """
    try:
        document = json.loads(out.read_text(encoding="utf-8"))
        own = {"traceEvents": [e for e in document["traceEvents"] if e["pid"] < 10_000_000]}
        wrong = check_format(own)
        if wrong:
            raise SpecmeterError("The trace read back is not as the format says", wrong[0], exit=Exit.INTERNAL)
        return _difference(own, saved, timeline)
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def _difference(own: dict[str, Any], saved: Run, timeline: Timeline) -> dict[str, Any]:
    """The largest difference of a phase, ms, or None and the reason: a trace without the report's cycles is whole."""
    phases, setting = saved.analysis.get("phases") or [], saved.analysis.get("setting")
    if timeline.cycles < timeline.cycles_total or not phases:
        return {"phase_difference_ms": None, "reason": "the window is not the whole run, or it has no phase table"}
    if not any_decode(own, setting):
        return {"phase_difference_ms": None, "reason": "it holds no decode cycle of the report's setting"}
    sums = phase_table(own, setting, nested=False)
    return {"phase_difference_ms": max(abs(sums.get(row["name"], 0.0) - row["ms"]) for row in phases)}


def _perfetto(
    saved: Run, out: Path, _args: argparse.Namespace, window: tuple[int, int | None] | None
) -> tuple[dict[str, Any], list[str]]:
    timeline, warnings = _timeline(saved, window)
    data = perfetto_trace(timeline)
    _whole(out, lambda file: file.buffer.write(data))  # type: ignore[attr-defined]
    return _facts(timeline), warnings


def _facts(timeline: Timeline) -> dict[str, Any]:
    return {
        "slices": timeline.slices, "cycles": timeline.cycles, "cycles_in_run": timeline.cycles_total,
        "ranks": len(timeline.processes), "lanes": [f"{lane.kind}: {len(lane)}" for lane in timeline.lanes],
    }  # fmt: skip


def _json(saved: Run, out: Path, *_rest: Any) -> tuple[dict[str, Any], list[str]]:
    _whole(out, lambda file: write_json_export(saved, file))
    return {}, []


def _parquet(saved: Run, out: Path, *_rest: Any) -> tuple[dict[str, Any], list[str]]:
    try:
        out.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        return {"files": [path.name for path in write_parquet(saved, out)]}, []
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _openmetrics(saved: Run, out: Path, *_rest: Any) -> tuple[dict[str, Any], list[str]]:
    text = openmetrics_text(run_figures(saved))
    _whole(out, lambda file: file.write(text))
    return {}, []


def _whole(out: Path, write: Callable[[IO[str]], object]) -> None:
    """Write a file (0600) under another name and move it into place."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            write(file)
        part.replace(out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        part.unlink(missing_ok=True)


def _unwritable(out: Path, error: OSError) -> SpecmeterError:
    return SpecmeterError(
        f"{out} cannot be written", str(error.strerror), "Name another path with --out.", Exit.ENVIRONMENT
    )


def _say(result: dict[str, Any], warnings: list[str]) -> None:
    if "slices" in result:
        cycles = f"{result['cycles']} of {result['cycles_in_run']} cycles"
        print(f"{result['slices']} slices, {cycles}, {result['ranks']} rank{'s' if result['ranks'] != 1 else ''}")
    if "torch_events" in result:
        print(f"torch.profiler: {result['torch_events']} events, {result['torch_events_in_window']} in the window")
    if result.get("phase_difference_ms") is not None:
        print(f"read back: phases agree with the report within {result['phase_difference_ms']:.1e} ms a cycle")
    elif "reason" in result:
        print(f"read back: not compared with the report: {result['reason']}")
    for warning in warnings:
        print(f"note: {warning}")
    print(f"saved: {Path(result['path']).absolute()}")


_WRITERS: dict[str, Callable[..., tuple[dict[str, Any], list[str]]]] = {
    "chrome": _chrome, "perfetto": _perfetto, "parquet": _parquet, "json": _json, "openmetrics": _openmetrics,
}  # fmt: skip
