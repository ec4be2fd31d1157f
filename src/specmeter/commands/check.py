"""``specmeter check``: is the draft head fed what it was trained on?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError
from specmeter.wiring.check import Result, check_pair, open_pair
from specmeter.wiring.feed import Feed, key_text
from specmeter.wiring.findings import Severity, in_order
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.locate import Engine, in_environment, in_folder, parse_engine
from specmeter.wiring.report import write_check


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``check``."""
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="folder of the target model")
    parser.add_argument("--draft", type=Path, required=True, metavar="DIR", help="folder of the draft head")
    parser.add_argument("--engine", metavar="NAME[==V]", help="sglang or vllm; without it both, newest releases known")
    parser.add_argument("--python", metavar="EXE", help="the Python of the server, whose engine source is read")
    parser.add_argument("--path", type=Path, metavar="DIR", help="a folder with the engine's source")
    parser.add_argument("--trained", type=_layers, metavar="K,K,K", help="states that the head was trained on (H[k])")
    parser.add_argument("--serve-context", type=int, metavar="TOKENS", help="context length of the server")
    parser.add_argument("--algorithm", metavar="NAME", help="speculative algorithm of the server, as EAGLE3")
    parser.add_argument("--steps", type=int, help="draft steps (vLLM: num_speculative_tokens)")
    parser.add_argument("--topk", type=int, help="branches of a draft step")
    parser.add_argument("--draft-tokens", type=int, help="tokens that one cycle verifies, the root included")
    parser.add_argument("--tp", type=int, help="tensor parallel size of the target")
    parser.add_argument("--draft-tp", type=int, help="tensor parallel size asked for the draft")
    parser.add_argument("--probe", action="store_true", help="run the pair: accept length under this wiring and others")
    parser.add_argument("--scan", action="store_true", help="run the pair: find the layers the head was trained on")
    parser.add_argument("--threads", type=int, help="compute threads of --probe and --scan")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Check, report, and return 1 when there is a finding of severity error."""
    engines = _engines(args)
    settings = Settings(args.algorithm, args.steps, args.topk, args.draft_tokens, args.draft_tp, args.tp)
    result = check_pair(open_pair(args.target, args.draft), engines, settings, args.serve_context, args.trained)
    if args.probe or args.scan:
        # Only here is torch needed: the static check runs on a bare install.
        from specmeter.wiring.numeric_run import measure

        numbers = measure(result, args.probe, args.scan, args.threads, _say)
        result = replace(result, findings=tuple(in_order([*result.findings, *numbers.findings])), numbers=numbers)
    if args.json:
        print(json.dumps(as_document(result)))
    else:
        write_check(result)
    failed = any(finding.severity is Severity.ERROR for finding in result.findings)
    return int(Exit.FINDING if failed else Exit.DONE)


def _say(text: str) -> None:
    print(f"specmeter: {text}", file=sys.stderr)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace("H[", "").replace("]", "").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 3,16,28") from None


def _engines(args: argparse.Namespace) -> list[Engine]:
    if args.engine is None:
        if args.python or args.path:
            raise SpecmeterError("--python and --path need --engine", next_step="Add --engine sglang or --engine vllm.")
        return []
    name, version = parse_engine(args.engine)
    if args.path is not None:
        return [in_folder(args.path, name, version)]
    if args.python is not None:
        return [in_environment(args.python, name)]
    return [Engine(name, version, None)]


def as_document(result: Result) -> dict[str, object]:
    """The ``--json`` document of a check."""
    head, trained = result.pair.head, result.trained
    return {
        "schema": "specmeter/check/1",
        "version": __version__,
        "command": "check",
        "result": {
            "target": str(result.pair.target_files.folder),
            "draft": str(head.checkpoint.folder),
            "target_layers": result.pair.target.layers,
            "head": {"kind": head.kind, "states": head.states, "hidden_size": head.shape.hidden},
            "trained": {
                "states": None if trained.states is None else list(trained.states),
                "certain": trained.certain,
                "reason": trained.why,
            },
            "feeds": [_feed(feed) for feed in result.feeds],
            "findings": [finding.as_json() for finding in result.findings],
            "numbers": None if result.numbers is None else result.numbers.as_json(),
            "errors": sum(finding.severity is Severity.ERROR for finding in result.findings),
        },
        "warnings": [],
    }


def _feed(feed: Feed) -> dict[str, object]:
    return {
        "engine": feed.engine,
        "engine_version": feed.version or None,
        "reader": feed.reader or None,
        "used_by_default": feed.used,
        "origin": feed.origin,
        "key_read": key_text(feed.key) if feed.key else None,
        "keys_understood": [key_text(key) for key in feed.reads],
        "ids": None if feed.ids is None else list(feed.ids),
        "states": None if feed.states is None else list(feed.states),
        "graph_states": None if feed.graph_states is None else list(feed.graph_states),
        "refusal": feed.refusal or None,
        "evidence": [{"says": mark.says, "file": str(mark.path), "line": mark.line} for mark in feed.evidence],
    }
