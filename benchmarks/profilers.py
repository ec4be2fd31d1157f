"""Cycle time of one server under specmeter armed, viztracer, py-spy record and cProfile, against no tool.

    pip install --target TOOLS viztracer py-spy
    python benchmarks/profilers.py --out DIR --tools TOOLS [--starts 5] [--budget-s 700] -- PYTHON -m MODULE ARGS

Within one start the tools are turned on and off in turn, in a seeded random order in each round, because equal starts
differ by more than some tools cost: specmeter by arming and disarming, py-spy by ``record --pid --subprocesses`` (its
100 samples a second), viztracer and cProfile by a signal to every process (``profilers_site.py``). Each answers the
same greedy prompts, so equal tokens mean equal cycles, and the ratio of the times from first to last token, prompt by
prompt, is that of the cycles. DIR/starts.jsonl gets one line a start, and a second call goes on after the last one.
Printed is each tool's ratio to no tool, the mean over starts, with a 95 % interval over starts (t on the logarithm;
none below three starts).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from engine_probes import wait_for_model
from profilers_site import COUNT, CPROFILE, VIZTRACER
from questions import PROMPTS

from specmeter.control import Link, arm, disarm, launch_env
from specmeter.control.prepare import prepare_link
from specmeter.engines import engine_named
from specmeter.engines.process import ServerProcess, free_port

TOOLS = ("none", "specmeter", "py-spy", "cprofile", "viztracer")
SIGNALS = {"cprofile": CPROFILE, "viztracer": VIZTRACER}
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
WAIT_S = 15.0


class Server:
    """One start, with every tool at hand and none of them on."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        self.tools = args.tools.resolve()
        self.out = args.out.resolve() / f"start{number:02}"
        shutil.rmtree(self.out, ignore_errors=True)  # one that was cut off
        for name in ("site", "links", "inside"):
            (self.out / name).mkdir(mode=0o700, parents=True)
        shutil.copy(Path(__file__).with_name("profilers_site.py"), self.out / "site" / "sitecustomize.py")
        path = [str(self.out / "site"), str(self.tools), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PROFILERS_OUT": str(self.out / "inside"), "PYTHONPATH": os.pathsep.join(path).rstrip(":")}
        self.link: Link = prepare_link(args.command, engine=args.engine, base=self.out / "links", capacity=1 << 18)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = engine_named(args.engine).with_port(tuple(args.command), port)
        self.process = ServerProcess(command, launch_env(self.link, env), self.out / "server.log")

    def ready(self) -> None:
        """Wait until the model answers, and warm it up."""
        self.model = wait_for_model(self.process, self.url, 300.0)
        for prompt in PROMPTS[:2]:
            self.answer(prompt, 48)

    def answer(self, prompt: str, tokens: int) -> tuple[float, int, str]:
        """One greedy streamed answer: ms from its first piece to its last, pieces, text."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        stamps, text = [], ""
        with httpx.stream("POST", f"{self.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=300) as got:
            got.raise_for_status()
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    stamps.append(time.perf_counter())
                    text += json.loads(line[6:])["choices"][0]["text"]
        return (stamps[-1] - stamps[0]) * 1e3, len(stamps), text

    def pids(self) -> dict[int, str]:
        """The server's Python processes that are alive and listen to the signals, with their titles."""
        found = {}
        for path in (self.out / "inside").iterdir():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{path.name}/cmdline").read_bytes().split(b"\0")
                found[int(path.name)] = b" ".join(words).decode("utf-8", "replace").strip()[:60]
        return found

    def signalled(self, number: int) -> dict[int, dict[str, Any]]:
        """Send every process a signal; the line that each answers with, empty where none came in time."""
        files = {pid: self.out / "inside" / str(pid) for pid in self.pids()}
        before = {pid: len(file.read_text().splitlines()) for pid, file in files.items()}
        for pid in files:
            os.kill(pid, number)
        until, answers = time.monotonic() + WAIT_S, dict[int, dict[str, Any]]()
        while len(answers) < len(files) and time.monotonic() < until:
            time.sleep(0.05)
            for pid, file in files.items():
                lines = file.read_text().splitlines()
                if len(lines) > before[pid]:
                    answers[pid] = json.loads(lines[-1])
        return {pid: answers.get(pid, {}) for pid in files}

    @contextlib.contextmanager
    def under(self, tool: str, seen: dict[str, Any]) -> Iterator[None]:
        """``tool`` is on inside; afterwards ``seen[tool]`` says which processes it was in."""
        if tool == "specmeter":
            ack = arm(self.link)
            seen[tool] = {str(found.pid): len(found.report["armed_points"]) for found in ack.done}
            yield
            disarm(self.link)
        elif tool in SIGNALS:
            seen[tool] = {str(pid): bool(said.get(tool)) for pid, said in self.signalled(SIGNALS[tool]).items()}
            yield
            self.signalled(SIGNALS[tool])
        elif tool == "py-spy":
            with self._py_spy() as raw:
                yield
            seen[tool] = samples(raw)
        else:
            yield

    @contextlib.contextmanager
    def _py_spy(self) -> Iterator[Path]:
        raw, log = self.out / "py-spy.raw", self.out / "py-spy.log"
        words = ["record", "--pid", str(self.process.pid), "--subprocesses", "--format", "raw", "-o", str(raw)]
        with log.open("wb") as file:
            spy = subprocess.Popen([str(self.tools / "bin" / "py-spy"), *words], stdout=file, stderr=file)
        until = time.monotonic() + WAIT_S
        while b"Sampling process" not in log.read_bytes():
            if spy.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"py-spy did not start: {log.read_text()}")
            time.sleep(0.05)
        try:
            yield raw
        finally:
            spy.send_signal(signal.SIGINT)
            spy.wait(30)


def samples(raw: Path) -> dict[str, Any]:
    """Samples in py-spy's raw file, by process title, and how many of them were inside ``execute_model``."""
    found: dict[str, list[int]] = {}
    for line in raw.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        process = [frame for frame in stack.split(";") if frame.startswith("process ")][-1:] or ["process ?"]
        entry = found.setdefault(process[0][:60], [0, 0])
        entry[0] += int(count)
        entry[1] += int(count) * ("execute_model" in stack)
    return {name: {"samples": entry[0], "steps": entry[1]} for name, entry in found.items()}


def one_start(args: argparse.Namespace, number: int, only: Sequence[str]) -> dict[str, Any]:
    """Start a server, measure all rounds, stop it; the line for starts.jsonl."""
    began, rng = time.monotonic(), random.Random(number)
    answers: list[dict[str, Any]] = []
    seen: dict[str, Any] = {}
    server = Server(args, number)
    try:
        server.ready()
        up_s = time.monotonic() - began
        for block in range(args.rounds):
            for tool in rng.sample(only, len(only)):
                with server.under(tool, seen):
                    server.answer(PROMPTS[0], 16)
                    for prompt in PROMPTS[: args.prompts]:
                        ms, pieces, text = server.answer(prompt, args.max_tokens)
                        answers.append(
                            {"tool": tool, "round": block, "prompt": prompt, "ms": ms, "pieces": pieces, "text": text}
                        )
        counted = {str(pid): said for pid, said in server.signalled(COUNT).items()} if len(only) > 1 else {}
        titles = {str(pid): title for pid, title in server.pids().items()}
    finally:
        server.process.stop()
    texts = {tool: [answer.pop("text") for answer in answers if answer["tool"] == tool] for tool in only}
    same = {tool: found == texts["none"] for tool, found in texts.items()}
    return {
        "start": number, "up_s": round(up_s, 1), "all_s": round(time.monotonic() - began, 1), "same_text": same,
        "processes": titles, "seen": seen, "counted": counted, "load": os.getloadavg()[0], "answers": answers,
    }  # fmt: skip


def ratio_of(start: Mapping[str, Any], tool: str) -> float:
    """Mean logarithm of ``tool``'s time over no tool's, over the prompts and rounds of one start."""
    times: dict[str, dict[tuple[int, str], float]] = {}
    for answer in start["answers"]:
        times.setdefault(answer["tool"], {})[answer["round"], answer["prompt"]] = answer["ms"]
    return statistics.mean(math.log(ms / times["none"][key]) for key, ms in times[tool].items())


def compare(starts: Sequence[Mapping[str, Any]], tools: Sequence[str]) -> list[dict[str, Any]]:
    """Each tool's cycle and its ratio to no tool."""
    rows = []
    for tool in tools:
        logs = [ratio_of(start, tool) for start in starts]
        answers = [a for start in starts for a in start["answers"]]
        cycles = sum(a["pieces"] - 1 for a in answers if a["tool"] == "none")  # equal tokens, equal cycles
        ms = sum(a["ms"] for a in answers if a["tool"] == tool) / cycles
        row: dict[str, Any] = {"tool": tool, "cycle_ms": round(ms, 3), "ratio": math.exp(statistics.mean(logs))}
        row |= {"low": None, "high": None, "starts": [round(math.exp(log), 4) for log in logs]}
        if len(logs) >= 3 and tool != "none":
            half = T_95.get(len(logs) - 1, 1.96) * statistics.stdev(logs) / math.sqrt(len(logs))
            row |= {"low": row["ratio"] * math.exp(-half), "high": row["ratio"] * math.exp(half)}
        rows.append(row)
    return rows


def report(out: Path, starts: Sequence[Mapping[str, Any]], tools: Sequence[str]) -> None:
    """Write DIR/profilers.json and print the table."""
    machine = f"{os.cpu_count()} cores {platform.machine()}, load {max(start['load'] for start in starts):.1f} at most"
    rows = compare(starts, tools)
    (out / "profilers.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    print(f"{len(starts)} starts, {machine}")
    for row in rows:
        spread = "" if row["low"] is None else f"  [{row['low']:.4f}, {row['high']:.4f}]"
        print(f"{row['tool']:10} {row['cycle_ms']:8.2f} ms a cycle  x {row['ratio']:.4f}{spread}  {row['starts']}")


def main() -> None:
    """Start, ask, stop, compare, print; goes on where an earlier call ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--only", default=",".join(TOOLS))
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budget-s", type=float, default=700.0, help="no start that would end later than this")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    only = [tool for tool in TOOLS if tool in args.only.split(",") or tool == "none"]
    args.out.mkdir(parents=True, exist_ok=True)
    lines = args.out / "starts.jsonl"
    starts = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    began = time.monotonic()
    while len(starts) < args.starts:
        longest = max([start["all_s"] for start in starts], default=0.0)
        if time.monotonic() - began + longest > args.budget_s:
            print(f"stopped after {len(starts)} of {args.starts} starts: the next would take {longest:.0f} s more")
            break
        starts.append(one_start(args, len(starts), only))
        with lines.open("a") as file:
            file.write(json.dumps(starts[-1]) + "\n")
        print(f"start {len(starts)}: {starts[-1]['all_s']} s, up after {starts[-1]['up_s']} s", flush=True)
    if starts:
        report(args.out, starts, only)


if __name__ == "__main__":
    main()
