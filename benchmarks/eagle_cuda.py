"""The embedded engine on a GPU: plain and EAGLE-3 decoding rates, device time of each graph, and the floor.

    PYTHONPATH=src:. python benchmarks/eagle_cuda.py --model DIR [--out FILE] [--seconds 85] [--only engine graphs ...]

Batch 1, greedy. Needs torch with CUDA, triton, numpy, safetensors, tokenizers, this repository and the model directory
(269 MB; --random makes up weights of the same shapes, whose rates are real and whose accept length means nothing).
Each section stands alone: one that fails prints its traceback and the rest goes on. A rate is tokens per second of one
request without its prompt; settings are in random order at each prompt, and a figure is the median over prompts and
repeats with a 95 % interval (binomial order statistics). JSON: one line a section as it ends, all of it in --out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eagle_cuda_parts import (
    Models,
    Session,
    counted,
    event_time_us,
    fused_cycle,
    layer_graphs,
    random_model,
)
from questions import FORM, MORE_QUESTIONS

from specmeter.eagle.cuda_graphs import Graphs
from specmeter.eagle.cuda_ops import Ops, TorchOps
from specmeter.eagle.cuda_triton import TritonOps, Tuning
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from tests.support.cuda_reference import CHECKS, Bench, Size, check_same_rows

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {
    "default": Tuning(),
    "pdl": Tuning(pdl=True),
    "8 warps": Tuning(warps=8),
    "2 warps": Tuning(warps=2),
    "k 256, 3 stages": Tuning(inner=256, stages=3),
    "k 64, 7 stages": Tuning(inner=64, stages=7),
    "32 columns": Tuning(columns=32),
    "vocab 32": Tuning(vocab_columns=32),
    "vocab 128": Tuning(vocab_columns=128, stages=4),
    "keys 64": Tuning(keys=64),
    "pdl, k 256, 3 stages": Tuning(pdl=True, inner=256, stages=3),
    "pdl, 8 warps": Tuning(pdl=True, warps=8),
    "pdl, 2 warps": Tuning(pdl=True, warps=2),
}


def main() -> None:
    """Runs the sections in order of their worth."""
    session = Session(parse())
    if session.options.warm:
        warm(session, session.options.warm)
        return
    session.section("machine", lambda: machine(session))
    half, single = torch.bfloat16, torch.float32
    session.section("compile", lambda: compile_variants(session))
    session.section("kernels", lambda: kernel_errors({"triton": TritonOps(), "torch": TorchOps()}, half))
    session.section("engine", lambda: rates(session, TritonOps(), session.options.repeats))
    session.section("graphs", lambda: graph_times(session, TritonOps()))
    session.section("layers", lambda: layer_times(session))
    session.section("kernels_pdl", lambda: kernel_errors({"triton pdl": TritonOps(Tuning(pdl=True))}, half))
    session.section("engine_pdl", lambda: rates(session, TritonOps(Tuning(pdl=True)), 2))
    session.section("variants", lambda: variants(session))
    session.section("graphs_torch", lambda: graph_times(session, TorchOps()))
    session.section("kernels_float32", lambda: kernel_errors({"triton": TritonOps()}, single))
    session.section("float32", lambda: float32_tokens(session))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the fetched model's directory")
    parser.add_argument("--random", action="store_true", help="made-up weights of SmolLM2-135M's shapes")
    parser.add_argument("--head", type=Path, default=ROOT / "src/specmeter/eagle/heads/smollm2-135m-v1")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5, 6])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="these sections only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", help="only compile this variant's kernels (started by the script itself)")
    options = parser.parse_args()
    if options.random:
        options.model = random_model(Path(tempfile.mkdtemp()))
    if options.model is None:
        parser.error("--model DIR or --random")
    return options


def compile_variants(session: Session) -> dict[str, Any]:
    """Every variant's kernels into Triton's cache, each in a process of its own, all at once; nothing is timed yet."""
    options = session.options
    command = [sys.executable, __file__, "--model", str(options.model), "--head", str(options.head), "--warm"]
    running = {
        name: subprocess.Popen([*command, name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for name in VARIANTS
    }
    found: dict[str, Any] = {}
    for name, process in running.items():
        try:
            errors = process.communicate(timeout=max(5.0, session.left()))[1]
            found[name] = "compiled" if process.returncode == 0 else errors[-2500:]
        except subprocess.TimeoutExpired:
            process.kill()
            found[name] = "not compiled in time"
    return found


def warm(session: Session, name: str) -> None:
    """Runs every pass once with the operations of one variant."""
    passes = session.models.worker(TritonOps(VARIANTS[name])).passes
    passes.clear()
    for splits in (1, 8):
        passes.draft(3, splits)
        passes.verify(3, splits)
        passes.accept(3)
        passes.extend(3, splits)
    torch.cuda.synchronize()


def machine(session: Session) -> dict[str, Any]:
    """What the figures are measured on, and the bandwidth that the floor is counted with."""
    import triton

    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copy_us = event_time_us(lambda: target.copy_(source), 20)
    weights = session.models.target_bytes()
    bandwidth = 2 * source.numel() * 4 / copy_us * 1e6
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "random_weights": session.options.random,
        "bandwidth_tb_s": bandwidth / 1e12,
        "bytes_a_token": weights,
        "floor_us_a_step": weights / bandwidth * 1e6,
    }


def kernel_errors(all_ops: dict[str, Ops], dtype: torch.dtype) -> dict[str, Any]:
    """Relative error of every operation against float64, at SmolLM2's shapes."""
    found: dict[str, Any] = {}
    for name, ops in all_ops.items():
        row = found[name] = {}
        for check, function in {**CHECKS, "same alone": check_same_rows}.items():
            try:
                row[check] = float(f"{function(ops, Bench(Size(), 'cuda', dtype)):.2e}")
            except Exception as error:
                row[check] = f"{type(error).__name__}: {str(error)[-1500:]}"
    return found


@dataclass
class Tally:
    """What the requests with one number of draft steps gave; ``tokens`` by prompt, of the first repeat."""

    speeds: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    produced: int = 0
    cycles: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def summary(self, plain: dict[int, list[int]]) -> dict[str, Any]:
        """Rates with intervals, accept length, and prompts whose tokens are not ``plain``'s."""
        length = self.produced / self.cycles
        return {
            "tok_s": interval(self.speeds),
            "ms_a_cycle": round(1000 * length / statistics.median(self.speeds), 4),
            "accept_length": round(length, 3),
            "times_plain": interval(self.gains),
            "prompts_with_other_tokens_than_plain": sum(ids != plain.get(n) for n, ids in self.tokens.items()),
        }


def rates(session: Session, ops: Ops, repeats: int) -> dict[str, Any]:
    """Tokens per second, accept length and agreement with plain decoding, for each number of draft steps."""
    options, engine = session.options, session.models.engine(ops)
    prompts, draw = encoded(options), random.Random(options.seed)
    tallies = {steps: Tally() for steps in options.steps}
    for steps in options.steps:
        one_request(engine, prompts[0], steps, 24)
    for _ in range(repeats):
        for number, prompt in enumerate(prompts):
            order, here = list(options.steps), {}
            draw.shuffle(order)
            for steps in order:
                ids, here[steps], cycles = one_request(engine, prompt, steps, options.tokens)
                tally = tallies[steps]
                tally.tokens.setdefault(number, ids)
                tally.produced += len(ids) - 1
                tally.cycles += cycles
            for steps, speed in here.items():
                tallies[steps].speeds.append(speed)
                tallies[steps].gains.append(speed / here.get(0, speed))
    plain = tallies[0].tokens if 0 in tallies else {}
    found = {f"k={steps}": tally.summary(plain) for steps, tally in tallies.items()}
    return found | {"requests": len(prompts) * repeats, "tokens": options.tokens, "ops": ops.name}


def one_request(engine: Engine, prompt: list[int], steps: int, count: int) -> tuple[list[int], float, int]:
    """Tokens, tokens per second after the first, and cycles, of one greedy request."""
    cycles = engine.generate(prompt, Sampling(max_tokens=count, ignore_eos=True), SpecSettings(steps))
    ids = list(next(cycles).token_ids)
    number, started = 0, time.perf_counter()
    for cycle in cycles:
        ids += cycle.token_ids
        number += 1
    return ids, (len(ids) - 1) / (time.perf_counter() - started), number


def graph_times(session: Session, ops: Ops, steps: tuple[int, ...] = (1, 3, 5), length: int = 256) -> dict[str, Any]:
    """Device time of each graph by events, at a context of ``length``, and kernels in it."""
    worker = session.models.worker(ops)
    passes, graphs = worker.passes, Graphs(worker.device)
    found: dict[str, Any] = {"context": length}

    def timed(work: Callable[[], None], moves: bool = False, times: int = 1) -> dict[str, float]:
        # A graph that moves the length on is given the same one each time; a short one is repeated inside the graph,
        # since the host starts no more than one graph in 5 us.
        passes.clear()
        kernels = counted(passes, work)

        def repeated() -> None:
            for _ in range(times):
                work()

        replay = graphs.prepare(repeated)
        passes.book.base.fill_(length)
        passes.book.past.fill_(length)
        if not moves:
            return {"us": event_time_us(replay, 200) / times, "kernels": kernels}

        def once() -> None:
            passes.book.base.fill_(length)
            replay()

        empty = event_time_us(lambda: passes.book.base.fill_(length), 200)
        return {"us": event_time_us(once, 200) - empty, "kernels": kernels}

    found["plain"] = timed(passes.plain, moves=True)
    for k in steps:
        parts = {
            "draft": timed(partial(passes.draft, k)) if k > 1 else {},
            "verify": timed(partial(passes.verify, k)),
            "accept": timed(partial(passes.accept, k), times=10),
            "extend": timed(partial(passes.extend, k)),
            "one graph": timed(partial(fused_cycle, passes, k), moves=True),
            "graphs one after another": {"us": session.models.cycle_us(ops, k, length)},
        }
        found[f"k={k}"] = parts
    return found


def layer_times(session: Session) -> dict[str, Any]:
    """Microseconds of each kernel, launch gap included: a graph of the same operation on every layer's weights."""
    found: dict[str, Any] = {}
    for name, tuning in (("default", Tuning()), ("pdl", Tuning(pdl=True))):
        worker = session.models.worker(TritonOps(tuning))
        for rows in (1, 4):
            for kernel, (work, times) in layer_graphs(worker.passes, rows).items():
                worker.passes.clear()
                replay = worker.graphs.prepare(work)
                worker.passes.book.base.fill_(256)
                found[f"{name}, {rows} rows, {kernel}"] = round(event_time_us(replay, 100) / times, 3)
    return found


def variants(session: Session) -> dict[str, Any]:
    """The plain step and the verify pass of 4 rows with other block sizes, while there is time."""
    found: dict[str, Any] = {}
    for name, tuning in VARIANTS.items():
        if session.left() < 12:
            found[name] = "no time left"
            continue
        try:
            worker = session.models.worker(TritonOps(tuning))
            times = []
            for steps in (0, 3):
                worker.passes.clear()
                replay = worker.graphs.prepare(partial(worker.passes.verify, steps))
                worker.passes.book.base.fill_(256)
                times.append(round(event_time_us(replay, 200), 1))
            found[name] = {"verify 1 row": times[0], "verify 4 rows": times[1]}
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[-800:]}"
    return found


def float32_tokens(session: Session) -> dict[str, Any]:
    """In float32: prompts whose tokens differ from plain decoding's, and from those of the path without graphs."""
    options = session.options
    engine = Models.load(options.model, options.head, "float32").engine(TritonOps())
    differing: Counter[str] = Counter()
    for prompt in encoded(options)[:3]:
        plain = one_request(engine, prompt, 0, 64)[0]
        for steps in (1, 3, 5):
            differing[f"k={steps}"] += one_request(engine, prompt, steps, 64)[0] != plain
        # A threshold that no draft fails takes the path that looks at every cycle.
        eager = engine.generate(prompt, Sampling(max_tokens=64, ignore_eos=True), SpecSettings(3, 1, None, 1e-30))
        differing["no graphs"] += [token for cycle in eager for token in cycle.token_ids] != plain
    return dict(differing)


def encoded(options: argparse.Namespace) -> list[list[int]]:
    """The prompts as token ids; made up for a made-up model."""
    if options.random:
        draw = random.Random(0)
        return [[draw.randrange(1000) for _ in range(30)] for _ in range(options.prompts)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    return [tokenizer.encode(FORM.format(q), add_special_tokens=False).ids for q in MORE_QUESTIONS[: options.prompts]]


def interval(values: list[float]) -> list[float]:
    """Low, median, high: order statistics whose coverage of the median is at least 95 % (normal approximation)."""
    ordered, n = sorted(values), len(values)
    reach, middle = round(0.98 * n**0.5), (n - 1) / 2
    picks = (ordered[max(0, int(middle - reach))], statistics.median(ordered))
    return [round(v, 4) for v in (*picks, ordered[min(n - 1, int(middle + reach + 1))])]


if __name__ == "__main__":
    main()
