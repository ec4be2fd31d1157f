"""``specmeter explain``: why this step count, what another would bring, and the three things most worth trying."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.analysis.costmodel_bytes import read_shape
from specmeter.analysis.costmodel_evidence import MOST_STEPS
from specmeter.analysis.costmodel_explain import evidence_of, explain
from specmeter.analysis.costmodel_figures import read_figures
from specmeter.analysis.costmodel_measured import measured_speedup
from specmeter.analysis.costmodel_reported import explain_figures
from specmeter.analysis.moe import Experts
from specmeter.analysis.pooling import check_pool, facts_of
from specmeter.commands.attention_backends import proposable
from specmeter.commands.explain_commands import commands_for, server_engine
from specmeter.commands.load_options import add_load_arguments, add_probe_arguments
from specmeter.commands.plain_start import plain_start
from specmeter.commands.recorded import EMBEDDED_FACTS, named_otherwise, recorded, served
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.terminal import print_analysis
from specmeter.trace.rundir import Run, load


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain``."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories of profile, sweep or demo")
    parser.add_argument("--what-if", action="append", default=[], metavar="WORDS", help='as "verify 27 %% faster"')
    parser.add_argument("--now", type=int, metavar="K", help="the draft steps that run at present")
    parser.add_argument("--upto", type=int, metavar="K", help="predict 1 to K draft steps (default: a little beyond)")
    parser.add_argument("--experts", metavar="TOTAL/EACH", help="a mixture of experts, as 128/8 (default: dense)")
    parser.add_argument("--shape", type=Path, metavar="CONFIG", help="the target's config.json: what a forward reads")
    parser.add_argument("--acceptance", metavar="LIST", help="shares kept by position, where the run recorded none")
    parser.add_argument("--pool", action="store_true", help="take runs together that differ in more than the steps")
    parser.add_argument("--baseline", metavar="DIR", help="a run that measured plain decoding of the same server")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="explain published figures in a TOML file instead")
    live = parser.add_argument_group("a running server, with --live")
    live.add_argument("--live", action="store_true", help="load the server now, and explain what is seen")
    live.add_argument("--seconds", type=float, default=50.0, metavar="S", help="of load (default: 50)")
    add_load_arguments(parser, requests=3, max_tokens=64)
    add_probe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Explain saved runs, a running server, or published figures."""
    if args.figures is not None:
        return _figures(args)
    notes: list[str] = []
    if args.live:
        # The load generator is only needed here; explaining a saved run starts without it.
        from specmeter.bench.progress import Progress
        from specmeter.commands.explain_live import profile_live

        # Two open-ended lists: the parser gives all words to the first, which here are the server's command.
        args.server_command, args.runs = args.runs, []
        path, notes = profile_live(args, ["specmeter", *sys.argv[1:]], Progress())
        args.runs = [path]
    if not args.runs:
        raise SpecmeterError(
            "No run is named.", next_step="Give a run directory, as specmeter explain DIR, or --live with a server."
        )
    runs = [load(Path(path)) for path in args.runs]
    show(args, runs, notes)
    return int(Exit.DONE)


def _figures(args: argparse.Namespace) -> int:
    if args.runs or args.what_if:
        raise SpecmeterError("--figures goes alone.", "Published figures hold no phases to change.")
    document = explain_figures(*read_figures(args.figures))
    if args.json:
        print_document("explain", document, [])
    else:
        print_analysis(document)
    return int(Exit.DONE)


def show(args: argparse.Namespace, runs: Sequence[Run], notes: Sequence[str] = ()) -> None:
    """Print what the runs explain, as text or JSON; ``notes`` are warnings besides those of the runs."""
    shape = read_shape(args.shape) if args.shape else None
    experts = Experts.parse(args.experts) if args.experts else (shape.experts if shape else None)
    apart = _apart(runs, args.pool) if len(runs) > 1 else []
    plain, unused = plain_start(runs, args.baseline, args.pool)
    evidence = evidence_of(runs, args.now, experts, shares(args.acceptance), plain)
    known = max(s.steps for s in evidence.chains)
    most = args.upto if args.upto is not None else min(MOST_STEPS, max(known, evidence.now) + 2)
    if not 1 <= most <= MOST_STEPS:
        raise SpecmeterError(f"--upto is {most}.", f"It must lie in 1..{MOST_STEPS}.")
    backends, without = proposable(runs[0], server_engine(runs[0]))
    commands = commands_for(runs[0], evidence.now, backends)
    facts = {
        "runs": [str(r.path) for r in runs],
        "engine": commands.engine or None,
        "measured": measured_speedup(runs, evidence),
    }
    document = explain(evidence, range(1, most + 1), args.what_if, commands, facts, shape, context_of(runs))
    document["assumptions"] += [*unused, *([without] if without else [])]
    warnings = [f"{r.path} is not complete: it was cut off" for r in runs if r.run.get("status") != "complete"]
    warnings += [f"pooled although they differ: {line}" for line in apart]
    warnings += [*_unknown(runs), *notes]
    if args.json:
        print_document("explain", document, warnings)
        return
    print_analysis(document)
    for warning in warnings:
        print(f"note: {warning}")


def _apart(runs: Sequence[Run], pool: bool) -> list[str]:
    """In what the runs differ beside their step counts. Raises SpecmeterError for that unless they are to be pooled."""
    facts = []
    for run in runs:
        line, known = recorded(run), facts_of(run)
        facts.append({**known, **served(line, server_engine(run))})
    return check_pool(runs, facts, pool)


def _unknown(runs: Sequence[Run]) -> list[str]:
    """What could not be compared of runs that are taken together, a line for each run whose server was running."""
    without = [run for run in runs if len(runs) > 1 and named_otherwise(recorded(run))]
    return [
        f"{', '.join(EMBEDDED_FACTS)} of the server are not known of {run.path}, which named it by "
        "address, link or file: they were not compared"
        for run in without
    ]


def context_of(runs: Sequence[Run]) -> float:
    """Mean tokens of cache while decoding: the prompt and half of the answer; 0 where the runs have no requests."""
    found = [run.requests for run in runs]
    lengths = [
        float((r["prompt_tokens"] + r["output_tokens"] / 2).mean()) for r in found if r and len(r["prompt_tokens"])
    ]
    return sum(lengths) / len(lengths) if lengths else 0.0


def print_document(command: str, document: dict[str, Any], warnings: Sequence[str]) -> None:
    """One JSON document on standard output."""
    whole = {
        "schema": f"specmeter/{command}/1",
        "version": __version__,
        "command": command,
        "result": document,
        "warnings": list(warnings),
    }
    print(json.dumps(whole, allow_nan=False))


def shares(text: str | None) -> tuple[float, ...] | None:
    """``0.7,0.5`` as numbers from 0 to 1. Raises SpecmeterError for anything else."""
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values or not all(0 <= v <= 1 for v in values):
        raise SpecmeterError(f"--acceptance {text} is no list of shares.", next_step="Write it as 0.7,0.5,0.4")
    return values
