"""Device time of SGLang 0.5.16 with EAGLE-3 on SmolLM2, one H200: the table of issue 4, unattended.

    python benchmarks/sglang_device_gpu.py SITE MODEL WORK --out OUT [--budget 540]
                                                         [--only SERVER...] [--steps NAME...]

SITE holds SGLang and what it imports, MODEL is the embedded engine's model directory; docs/gpu.md says how both get
there. Servers start side by side, are measured one at a time, and a later call does what is left. OUT receives
results.tgz in parts; WORK/results/smollm2 has a JSON file a measurement and the reports as text.

Servers: ``plain``; ``spec3`` (3 steps, under a link); ``clean`` (the same, specmeter nowhere near it); ``stamped``
(stamps in its graphs); ``timer`` (with SGLang's own device timer); ``sync`` (no overlap scheduling); ``plan`` (a stream
of its own for the metadata); ``steps2``, ``steps5``; ``adaptive`` (its steps are switched while it runs); ``teardown``
(CUPTI is taken down after a profile); ``fa3-plain``, ``fa3`` (FlashAttention 3 in place of Triton's attention, where
SITE holds it). Always-on is measured before a server's first deep window, whose profiler may leave something behind.

``--rehearse``: the same flow against the miniature server of the tests, without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_fa3 as fa3
import gpu_paired as paired
import gpu_windows as windows
from gpu_client import CHATS, Load, drive
from gpu_fleet import Place, Server, Start, eagle, miniature, sglang
from gpu_models import copy_head
from gpu_pack import packer, show_logs
from gpu_parts import CLOSING_S, Part, run_parts
from gpu_steps import Step, read, run_steps
from gpu_switching import adaptive_flags, sweep_steps

DEEP = 150
STEPS = (0, 1, 2, 3, 4, 5)
SINGLE, EIGHT = Load(rounds=5), Load(rounds=4, at_once=8, prompts=8)
LONG = Load(rounds=8)
SMALL = ("--mem-fraction-static", "0.7", "--max-total-tokens", "65536")
HEAD = Path(__file__).resolve().parents[1] / "src/specmeter/eagle/heads/smollm2-135m-v1"


def starts(model: Path, head: Path, work: Path) -> list[Start]:
    """The servers, in the order in which they are begun."""
    spec3 = sglang(model, *SMALL, *eagle(head, 3))
    return [
        Start("spec3", spec3),
        Start("plain", sglang(model, *SMALL)),
        Start("clean", spec3, linked=False),
        Start("stamped", spec3, device={"device_stamps": True}),
        Start("timer", spec3, {"SGLANG_ENABLE_METRICS_DEVICE_TIMER": "1"}),
        # At the most steps: a start at 3 reserves too few rows of logits for the graphs of 4 (sglang_tune_gpu.py).
        Start(
            "adaptive", (*sglang(model, *SMALL, *eagle(head, STEPS[-1])), *adaptive_flags(work, STEPS)),
            knobs=("draft_steps",),
        ),
        Start("sync", (*spec3, "--disable-overlap-schedule")),
        Start("plan", spec3, {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}),
        Start("steps2", sglang(model, *SMALL, *eagle(head, 2))),
        Start("steps5", sglang(model, *SMALL, *eagle(head, 5))),
        Start("teardown", spec3, {"TEARDOWN_CUPTI": "1"}),
        Start("fa3-plain", (*sglang(model, *SMALL), *fa3.FLAGS)),
        Start("fa3", (*spec3, *fa3.FLAGS)),
    ]  # fmt: skip


def steps() -> list[Step]:
    """The measurements, the most wanted first."""

    def spec(load: Load, name: str, against: str = "plain") -> Callable[[Server, Path], dict[str, Any]]:
        def run(running: Server, to: Path) -> dict[str, Any]:
            plain_step = windows.baseline_of(read(to, f"{against}.{load.at_once}"))
            return windows.phases(running, CHATS, load, to, name, plain_step)

        return run

    def plain(load: Load, name: str) -> Callable[[Server, Path], dict[str, Any]]:
        return lambda server, to: windows.phases(server, CHATS, load, to, name, None)

    def tokens(armed: bool = False) -> Callable[[Server, Path], dict[str, Any]]:
        return lambda server, to: windows.tokens(server, CHATS, armed)

    def mixed(server: Server, to: Path) -> dict[str, Any]:
        return windows.mixed(server, CHATS, LONG, windows.baseline_of(read(to, "plain.1")))

    def budget(server: Server, to: Path) -> dict[str, Any]:
        permille = int((read(to, "spec3.mixed") or {})["share"]["permille"])
        return paired.budget(server, CHATS, permille)

    def deep(at_once: int, setting: str = windows.SPEC) -> Callable[[Server, Path], dict[str, Any]]:
        return lambda server, to: windows.deep(server, CHATS, DEEP, at_once, setting)

    def around(server: Server, to: Path) -> dict[str, Any]:
        return paired.around_deep(server, CHATS, DEEP)

    def kept(server: Server, to: Path) -> dict[str, Any]:
        name = server.start.name
        against = "fa3-plain.1" if name == "fa3" else "plain.1"
        return windows.save_run(server, to, None if name.endswith("plain") else windows.baseline_of(read(to, against)))

    return [
        Step("tokens.never-loaded", "clean", 8, tokens()),
        Step("clean.rate", "clean", 15, lambda server, to: rate(server)),
        Step("plain.1", "plain", 15, plain(SINGLE, "plain.1")),
        Step("plain.8", "plain", 15, plain(EIGHT, "plain.8")),
        Step("plain.deep1", "plain", 40, deep(1, windows.PLAIN)),
        Step("plain.deep8", "plain", 40, deep(8, windows.PLAIN)),
        Step("plain.run", "plain", 10, kept, ("plain.deep1",)),
        Step("tokens.dormant", "spec3", 8, tokens()),
        Step("spec3.1", "spec3", 25, spec(SINGLE, "spec3.1"), ("plain.1",)),
        Step("tokens.armed", "spec3", 8, tokens(armed=True)),
        Step("spec3.8", "spec3", 20, spec(EIGHT, "spec3.8"), ("plain.8",)),
        Step("spec3.mixed", "spec3", 40, mixed, ("plain.1",)),
        Step("spec3.budget", "spec3", 115, budget, ("spec3.mixed",)),
        Step("tokens.disarmed", "spec3", 8, tokens()),
        Step("spec3.deep1", "spec3", 50, around),
        Step("spec3.deep8", "spec3", 40, deep(8)),
        Step("spec3.run", "spec3", 10, kept, ("spec3.deep1",)),
        Step("teardown.deep1", "teardown", 50, around),
        Step("teardown.again", "teardown", 50, around),
        Step("teardown.run", "teardown", 10, kept, ("teardown.deep1", "plain.1")),
        Step("tokens.stamped", "stamped", 8, tokens()),
        Step("stamped.1", "stamped", 20, spec(SINGLE, "stamped.1"), ("plain.1",)),
        Step("stamped.deep1", "stamped", 40, deep(1)),
        Step("stamped.run", "stamped", 10, kept, ("stamped.deep1",)),
        Step("timer", "timer", 20, own_timer, ("plain.1",)),
        Step("adaptive", "adaptive", 45, partial(sweep_steps, prompts=CHATS, candidates=STEPS)),
        Step("sync.1", "sync", 20, spec(SINGLE, "sync.1"), ("plain.1",)),
        Step("plan.1", "plan", 20, spec(SINGLE, "plan.1"), ("plain.1",)),
        Step("steps2.1", "steps2", 20, spec(SINGLE, "steps2.1"), ("plain.1",)),
        Step("steps5.1", "steps5", 20, spec(SINGLE, "steps5.1"), ("plain.1",)),
        Step("fa3-plain.1", "fa3-plain", 15, plain(SINGLE, "fa3-plain.1")),
        Step("fa3-plain.deep1", "fa3-plain", 40, deep(1, windows.PLAIN)),
        Step("fa3-plain.run", "fa3-plain", 10, kept, ("fa3-plain.deep1",)),
        Step("fa3.1", "fa3", 20, spec(SINGLE, "fa3.1", "fa3-plain"), ("fa3-plain.1",)),
        Step("fa3.deep1", "fa3", 40, deep(1)),
        Step("fa3.run", "fa3", 10, kept, ("fa3.deep1",)),
    ]


def rate(server: Server) -> dict[str, Any]:
    """Decode rates of a server without specmeter, at one and eight requests."""
    return {
        "1": drive(server.url, CHATS, SINGLE, "rate", windows.SPEC).summary(),
        "8": drive(server.url, CHATS, EIGHT, "rate", windows.SPEC).summary(),
    }


TIMED = "sglang:forward_execution_seconds"


def own_timer(server: Server, to: Path) -> dict[str, Any]:
    """Our device spans of the target's forward against SGLang's device timer around the same replays.

    Its counter grows by the seconds between two events around a forward (utils/device_timer.py); its last forward may
    be read late, which is one in thousands.
    """
    before = windows.metrics(server)
    document = windows.phases(server, CHATS, SINGLE, to, "timer.1", windows.baseline_of(read(to, "plain.1")))
    drive(server.url, CHATS, Load(1, 8, 1, 1), "flush", "flush")
    after = windows.metrics(server)

    def grown(category: str) -> float:
        def seconds(scrape: Any) -> float:
            found = scrape.samples.get(TIMED, [])
            return float(sum(s.value for s in found if s.labels.get("category") == category))

        return seconds(after) - seconds(before)

    categories = {s.labels.get("category", "") for s in after.samples.get(TIMED, [])}
    cycles = (after.total("sglang:spec_verify_calls") or 0) - (before.total("sglang:spec_verify_calls") or 0)
    theirs = {category: grown(category) for category in sorted(categories)}
    mean = 1000 * theirs.get("target_verify", 0.0) / cycles if cycles else None
    ours = document["device_medians"].get("verify.forward", {}).get("mean_ms")
    ratio = ours / mean if ours and mean else None
    return {
        "line": f"ours / theirs {ratio}",
        "their_seconds": theirs,
        "verify_calls": cycles,
        "their_mean_ms": mean,
        "our_mean_ms": ours,
        "ratio": ratio,
        "window": document,
    }


def compare(out: Path) -> dict[str, Any]:
    """What the step results say together: equal tokens, and speeds side by side."""
    first = read(out, "tokens.never-loaded")
    stages = ("tokens.dormant", "tokens.armed", "tokens.disarmed", "tokens.stamped")
    speeds = {}
    for name in [step.name for step in steps()]:
        document = read(out, name) or {}
        if "analysis" in document:
            analysis = document["analysis"]
            speeds[name] = {
                "cycle_ms": analysis["cycle"]["mean_ms"],
                "tok_s_median": document["client"]["decode_tok_s_median"],
                "break_even": analysis.get("break_even"),
                "accept_length": analysis["acceptance"].get("accept_length"),
            }
    return {"same_ids": {name: windows.same_ids(first, read(out, name)) for name in stages}, "speeds": speeds}


def chosen(found: Sequence[Step], servers: Sequence[str], names: Sequence[str], absent: Sequence[str]) -> list[Step]:
    """The steps of these servers or of these names, all where neither is given; never those of absent servers.

    Raises SystemExit for a name that no step or server has.
    """
    unknown = (set(servers) - {step.server for step in found}) | (set(names) - {step.name for step in found})
    if unknown:
        raise SystemExit(f"no such server or measurement: {', '.join(sorted(unknown))}")
    wanted = [step for step in found if not (servers or names) or step.server in servers or step.name in names]
    return [step for step in wanted if step.server not in absent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of this call")
    parser.add_argument("--only", nargs="+", default=[], metavar="SERVER", help="these servers alone")
    parser.add_argument("--steps", nargs="+", default=[], metavar="NAME", help="these measurements alone")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    place = Place(args.work, args.site, CHATS)
    servers = starts(args.model, copy_head(HEAD, args.work / "head"), args.work)
    if args.rehearse:
        place, servers = miniature(place, servers, STEPS)
    limit = args.budget - CLOSING_S - 5
    out = args.work / "results" / "smollm2"  # whichever servers a call is for, one folder
    out.mkdir(parents=True, exist_ok=True)
    absent = fa3.left_out(args.site, out, [server.name for server in servers], args.rehearse)
    wanted = chosen(steps(), args.only, args.steps, absent)

    def smollm2(results: Path) -> None:
        try:
            run_steps(place, servers, wanted, out, limit - 15)
        finally:
            together = compare(out)
            (out / "together.json").write_text(json.dumps(together, indent=1))
            print(json.dumps(together["same_ids"]), flush=True)
            for name, speed in together["speeds"].items():
                print(f"{name}: {speed['tok_s_median']} tok/s, cycle {speed['cycle_ms']['point']:.3f} ms", flush=True)

    digest = hashlib.sha256(" ".join(args.steps).encode()).hexdigest()[:12] if args.steps else ""
    name = "-".join(["smollm2", *args.only, *([digest] if digest else [])])  # a file's name, which has 255 bytes
    code = run_parts((Part(name, smollm2, limit),), args.work, args.budget, packer(args.out))
    show_logs(args.work)
    sys.exit(code)


if __name__ == "__main__":
    main()
