"""``specmeter check``: is the draft head fed what it was trained on?"""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.control.holder import describe, holder
from specmeter.control.link import Link, find_link
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.check_words import check_sentence, wiring_word
from specmeter.reporters.inert import inert
from specmeter.wiring.check import Result, check_pair, open_pair
from specmeter.wiring.embedded_source import NAME as EMBEDDED
from specmeter.wiring.feed import Feed, key_text
from specmeter.wiring.findings import Severity, in_order
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.locate import Engine, in_environment, in_folder, installed, parse_engine
from specmeter.wiring.option_checks import check_options, check_trained
from specmeter.wiring.report import write_check


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``check``."""
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="folder of the target model")
    parser.add_argument("--draft", type=Path, required=True, metavar="DIR", help="folder of the draft head")
    parser.add_argument(
        "--engine",
        metavar="NAME[==V]",
        help="sglang, vllm or specmeter; otherwise those that --python has, or the first two, newest releases known",
    )
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
    parser.add_argument("--live", action="store_true", help="compare with the running server of the only link there is")
    parser.add_argument("--link", metavar="ID", help="compare with the running server of this link (implies --live)")
    parser.add_argument(
        "--url", metavar="URL", help="with --live: send the server one request instead of waiting for one"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="with --live: seconds to wait for a request"
    )
    parser.add_argument(
        "--fail-on", choices=("error", "warning"), default="error", help="severity from which the exit code is 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Check, report, and return 1 when there is a finding of severity error (or warning, where --fail-on says so)."""
    sizes = ("steps", "topk", "draft_tokens", "tp", "draft_tp", "serve_context", "threads")
    check_options(**{name: getattr(args, name) for name in sizes})
    link = _link(args)
    engines = _engines(args) if link is None else [_engine_of(link, args)]
    settings = Settings(args.algorithm, args.steps, args.topk, args.draft_tokens, args.draft_tp, args.tp)
    pair = open_pair(args.target, args.draft)
    check_trained(pair, args.trained)
    result = check_pair(pair, engines, settings, args.serve_context, args.trained)
    if link is not None:
        result = _with_live(result, link, engines[0], settings, args)
    if args.probe or args.scan:
        # Only here is torch needed: the static check runs on a bare install.
        try:
            from specmeter.wiring.numeric_run import measure
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "specmeter":
                raise
            raise SpecmeterError(  # the folder that was sent to another host does not hold the engine
                "--probe and --scan run the pair, which is not done on another host.",
                "They need the embedded engine and torch, and specmeter installs nothing there.",
                "Leave them out with --on, or run them where the models are and specmeter is installed.",
                Exit.ENVIRONMENT,
            ) from None

        numbers = measure(result, args.probe, args.scan, args.threads, _say)
        result = replace(result, findings=tuple(in_order([*result.findings, *numbers.findings])), numbers=numbers)
    if args.json:
        print(json.dumps(as_document(result)))
    else:
        _print(result)
    failing = {Severity.ERROR, Severity(args.fail_on)}
    failed = any(finding.severity in failing for finding in result.findings)
    return int(Exit.FINDING if failed else Exit.DONE)


def _print(result: Result) -> None:
    """The verdict and the lines below it; plain where the report's library is not there, as on another host."""
    lines = io.StringIO()
    write_check(result, lines)
    sentence, word = check_sentence(_result(result)), wiring_word(_result(result))
    try:
        from specmeter.reporters.terminal import print_headed
    except ModuleNotFoundError:
        print("\n".join(inert(line, 4000) for line in (sentence, "", *lines.getvalue().splitlines())))
        return
    print_headed(sentence, word, lines.getvalue())


def _link(args: argparse.Namespace) -> Link | None:
    """The link that is asked for, if any."""
    if not args.live and args.link is None:
        if args.url is not None:
            raise SpecmeterError(
                "--url needs --live or --link", "It is where the running server is asked.", "Add --link ID, or --live."
            )
        return None
    if not args.wait > 0:  # NaN too
        raise SpecmeterError(
            f"--wait {args.wait:g} is no time to wait", "A request takes more than no time.", "Give seconds above 0."
        )
    link = find_link(args.link)
    if args.link is None:
        _take_unnamed(link)
    return link


def _take_unnamed(link: Link) -> None:
    """Say which link was taken; SpecmeterError (exit 3) when somebody controls it and it was not asked for by name."""
    other = holder(link)
    if other is not None:
        raise SpecmeterError(
            f"the only link, {link.id}, is under the control of somebody else",
            f"{describe(other)}. --live reads no server that others are at work with, unless it is named.",
            f"Wait until they are done, or name it: --link {link.id}",
            Exit.REFUSED,
        )
    _say(f"taking the only link there is: {link.id}")


def _engine_of(link: Link, args: argparse.Namespace) -> Engine:
    """The engine whose source the static answer comes from: the one asked for, else the one that the link runs."""
    plan = link.plan()
    name = str(plan["engine"])
    if args.engine is not None and parse_engine(args.engine)[0] != name:
        raise SpecmeterError(
            f"link {link.id} runs {name}, not {args.engine}", "The link knows its engine.", "Leave --engine out."
        )
    if args.path is not None:
        return in_folder(args.path, name, str(plan["engine_version"]))
    if name == EMBEDDED:
        return Engine(name, str(plan["engine_version"]), None)
    return in_environment(args.python or str(plan["python"]["executable"]), name)


def _with_live(result: Result, link: Link, engine: Engine, settings: Settings, args: argparse.Namespace) -> Result:
    """The result with what the server's processes hold, and what that means."""
    from specmeter.wiring.live import watch
    from specmeter.wiring.live_checks import compare

    if args.url is None:
        _say(f"waiting up to {args.wait:g} s for a request to the server of link {link.id}")
    live = compare(link.id, engine, result, watch(link, args.url, args.wait), settings)
    return replace(result, findings=tuple(in_order([*result.findings, *live.findings])), live=live)


def _say(text: str) -> None:
    print(f"specmeter: {text}", file=sys.stderr)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace("H[", "").replace("]", "").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 3,16,28") from None


def _engines(args: argparse.Namespace) -> list[Engine]:
    if args.engine is None:
        if args.path:
            raise SpecmeterError(
                "--path needs --engine",
                "It says where an engine's source is, not which engine it is.",
                "Add --engine sglang or --engine vllm.",
            )
        return installed(args.python) if args.python else []
    name, version = parse_engine(args.engine)
    if name == EMBEDDED:
        return [Engine(name, version or __version__, None)]
    if args.path is not None:
        return [in_folder(args.path, name, version)]
    if args.python is not None:
        return [in_environment(args.python, name)]
    return [Engine(name, version, None)]


def as_document(result: Result) -> dict[str, object]:
    """The ``--json`` document of a check."""
    head = {"schema": "specmeter/check/1", "version": __version__, "command": "check"}
    return {**head, "result": _result(result), "warnings": []}


def _result(result: Result) -> dict[str, Any]:
    head, trained = result.pair.head, result.trained
    return {
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
        "live": None if result.live is None else result.live.as_json(),
        "numbers": None if result.numbers is None else result.numbers.as_json(),
        "errors": sum(finding.severity is Severity.ERROR for finding in result.findings),
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
