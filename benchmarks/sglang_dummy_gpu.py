"""Models without weights on SGLang 0.5.16 with EAGLE-3: where verify is the cost. One to eight H200s, unattended.

    python benchmarks/sglang_dummy_gpu.py SITE WORK --out OUT --tp 1 --shapes 8b moe [--budget 540]
    python benchmarks/sglang_dummy_gpu.py SITE WORK --out OUT --tp 2 --shapes 70b
    python benchmarks/sglang_dummy_gpu.py SITE WORK --out OUT --tp 8 --shapes 70b moe200b

Weights are dummies (gpu_models.py), acceptance is simulated: ``ACCEPT`` tokens a cycle, the real draft tokens as text,
since one constant token would touch the same experts again and again. At tp 1: plain, 1, 3 and 5 steps, and one start
whose steps 0 to 5 are switched while it runs; a mixture also says which experts its tokens reach, and a dense model has
``fa3-plain`` and ``fa3`` (3 steps): FlashAttention 3 in place of Triton's attention, where SITE holds it. At tp 2 and
more: plain, and 3 steps with custom all-reduce, without it, and without peer access (NCCL_P2P_DISABLE=1, standing in
for a machine of PCIe cards). Custom all-reduce is SGLang's first version: the second one maps symmetric memory, which
is left alone on lent hosts. Servers that fit into the memory together start side by side.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_fa3 as fa3
import gpu_windows as windows
import httpx
import numpy as np
from gpu_client import Load, Prompt, id_prompts
from gpu_fleet import Place, Server, Start, eagle, miniature, sglang
from gpu_models import SHAPES, Shape, write_models
from gpu_pack import packer, show_logs
from gpu_parts import CLOSING_S, Part, run_parts
from gpu_steps import Step, read, run_steps, write
from gpu_switching import adaptive_flags, deep_at, sweep_steps

ACCEPT = 2.5
SIMULATED = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT), "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
FIRST_VERSION = {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}
SINGLE, EIGHT, SWITCHED = Load(rounds=3, tokens=160), Load(2, 128, at_once=8, prompts=8), range(6)
DEEP = 100
CARD_GB, SERVER_GB, RESERVE_GB = 149.0, 6.0, 12.0
START_S = 160.0


@dataclass(frozen=True)
class Wanted:
    """A start, the GB it takes of each card, and what is measured there."""

    start: Start
    gigabytes: float
    steps: tuple[Step, ...]


class Plan:
    """The starts and steps of one shape at one tensor parallel size."""

    def __init__(self, shape: Shape, tp: int, work: Path) -> None:
        self.shape, self.tp = shape, tp
        self.target, self.head = write_models(work / "models", shape)
        self.prompts: Sequence[Prompt] = id_prompts(shape.vocab)
        self.each_gb = 1.03 * shape.gigabytes / tp + SERVER_GB
        self.work = work

    def command(self, *more: str) -> tuple[str, ...]:
        """Dummy weights, ids in and out, and no more of the memory than the load needs."""
        ranks = ("--tp-size", str(self.tp)) if self.tp > 1 else ()
        mixture = ("--moe-runner-backend", "triton") if self.shape.experts else ()
        return sglang(
            self.target, "--load-format", "dummy", "--skip-tokenizer-init", "--mem-fraction-static", "0.92",
            "--max-total-tokens", "16384", *ranks, *mixture, *more,
        )  # fmt: skip

    def wanted(self) -> list[Wanted]:
        """Plain first: the others are compared with it."""
        plain = self._wanted("plain", self.command(), {})
        return [plain, *(self._ranks() if self.tp > 1 else self._alone())]

    def _ranks(self) -> list[Wanted]:
        spec, alone = self.command(*eagle(self.head, 3)), "--disable-custom-all-reduce"
        return [
            self._wanted("custom", spec, {}),
            self._wanted("nccl", (*spec, alone), {}),
            self._wanted("nop2p", (*spec, alone), {"NCCL_P2P_DISABLE": "1"}),
        ]

    def _alone(self) -> list[Wanted]:
        adaptive = (*self.command(*eagle(self.head, 5)), *adaptive_flags(self.work, SWITCHED))
        found = [
            Wanted(
                Start("adaptive", adaptive, SIMULATED, knobs=("draft_steps",)), self.each_gb + SERVER_GB,
                (
                    Step("adaptive.sweep", "adaptive", 60, partial(sweep_steps, prompts=self.prompts, blocks=3)),
                    *(Step(f"adaptive.deep{k}", "adaptive", 30, self._deep_at(k)) for k in (1, 3, 5, 2, 4)),
                    Step("adaptive.run", "adaptive", 15, self._kept, ("adaptive.deep1",)),
                ),
            )
        ]  # fmt: skip
        for k in (3, 1, 5):
            found.append(self._wanted(f"steps{k}", self.command(*eagle(self.head, k)), {}))
        if not self.shape.experts:
            found.append(self._wanted("fa3-plain", self.command(*fa3.FLAGS), {}))
            found.append(self._wanted("fa3", self.command(*eagle(self.head, 3), *fa3.FLAGS), {}, "fa3-plain"))
        if self.shape.experts:
            flags = ("--enable-return-routed-experts", "--disable-radix-cache")
            start = Start("experts", self.command(*flags), linked=False)
            found.append(Wanted(start, self.each_gb, (Step("experts", "experts", 20, self._experts, ("steps3.1",)),)))
        return found

    def _wanted(self, name: str, command: tuple[str, ...], env: dict[str, str], against: str = "plain") -> Wanted:
        spec = not name.endswith("plain")
        env = {**env, **(FIRST_VERSION if self.tp > 1 else {}), **(SIMULATED if spec else {})}
        setting = windows.SPEC if spec else windows.PLAIN
        deep = partial(windows.deep, prompts=self.prompts, cycles=DEEP, at_once=1, setting=setting)
        after, after8 = ((f"{against}.1",), (f"{against}.8",)) if spec else ((), ())
        steps = (
            Step(f"{name}.1", name, 25, self._phases(f"{name}.1", SINGLE, against if spec else ""), after),
            Step(f"{name}.deep1", name, 45, lambda server, to: deep(server)),
            Step(f"{name}.8", name, 20, self._phases(f"{name}.8", EIGHT, against if spec else ""), after8),
            Step(f"{name}.run", name, 15, self._kept, (f"{name}.deep1",)),
        )
        return Wanted(Start(name, command, env), self.each_gb, steps)

    def _phases(self, name: str, load: Load, against: str) -> Callable[[Server, Path], dict[str, Any]]:
        """``against``: the server whose plain step is the baseline; none for a plain server itself."""

        def run(server: Server, to: Path) -> dict[str, Any]:
            baseline = windows.baseline_of(read(to, f"{against}.{load.at_once}")) if against else None
            found = windows.phases(server, self.prompts, load, to, name, baseline)
            answers = windows.tokens(server, self.prompts[:4])
            return {**found, "ids_of": answers["ids_of"], "distinct_ids": answers["distinct_ids"]}

        return run

    def _deep_at(self, k: int) -> Callable[[Server, Path], dict[str, Any]]:
        return lambda server, to: deep_at(server, self.prompts, k, DEEP)

    def _kept(self, server: Server, to: Path) -> dict[str, Any]:
        name = server.start.name
        against = "fa3-plain.1" if name == "fa3" else "plain.1"
        return windows.save_run(server, to, None if name.endswith("plain") else windows.baseline_of(read(to, against)))

    def _experts(self, server: Server, to: Path) -> dict[str, Any]:
        return distinct_experts(server, self.prompts, (read(to, "steps3.1") or {})["ids_of"], self.shape)


def distinct_experts(
    server: Server, prompts: Sequence[Prompt], texts: Mapping[str, Sequence[int]], shape: Shape
) -> dict[str, Any]:
    """Distinct experts a layer that 1 to 8 neighbouring tokens of the speculative text reach, by prefill.

    ``texts``: ids of the answer to prompt ``p0``, ``p1`` and so on.
    """
    rows: dict[int, list[float]] = {n: [] for n in range(1, 9)}
    for index, prompt in enumerate(prompts[: len(texts)]):
        routed = routed_experts(server, (*map(int, prompt), *texts[f"p{index}"]), shape)[len(prompt) :]
        for n, found in rows.items():
            for at in range(0, len(routed) - n + 1, n):
                window = routed[at : at + n].transpose(1, 0, 2).reshape(shape.layers, -1)
                found.append(float(np.mean([len(np.unique(layer)) for layer in window])))
    measured = {n: float(np.mean(found)) for n, found in rows.items()}
    return {"line": f"distinct experts a layer: {measured}", "measured": measured}


def routed_experts(server: Server, ids: Sequence[int], shape: Shape) -> Any:
    """The experts of every token but the last, (tokens, layers, per token), as a prefill chose them."""
    body = {
        "input_ids": list(map(int, ids)),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "return_routed_experts": True,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    raw = np.frombuffer(base64.b64decode(answer.json()["meta_info"]["routed_experts"]), dtype=np.int32)
    return raw.reshape(-1, shape.layers, shape.per_token)


def chunks(wanted: Sequence[Wanted], most_gb: float) -> list[list[Wanted]]:
    """Starts that fit into the card together, in order."""
    found: list[list[Wanted]] = [[]]
    for one in wanted:
        if found[-1] and sum(each.gigabytes for each in found[-1]) + one.gigabytes > most_gb:
            found.append([])
        found[-1].append(one)
    return found


def bandwidth_gb_s() -> float | None:
    """GB/s of a large copy on the first card, bytes read and written counted; the mean of ten after three."""
    code = (
        "import torch; a=torch.empty(1<<31,dtype=torch.uint8,device='cuda'); b=torch.empty_like(a)\n"
        "for _ in range(3): b.copy_(a)\n"
        "x,y=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); x.record()\n"
        "for _ in range(10): b.copy_(a)\n"
        "y.record(); y.synchronize(); print(10*2*a.numel()/x.elapsed_time(y)/1e6)"
    )
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        return float(subprocess.run(["python3", "-c", code], capture_output=True, text=True, timeout=60).stdout)
    return None


def conclude(plan: Plan, out: Path) -> None:
    """What gpu_together.py needs to know of model and card; the results so far in a line each."""
    if not (out / "facts.json").exists():
        facts = {"gb_s_of_a_card": bandwidth_gb_s(), "tp": plan.tp, "context": 200.0, "accept_length": ACCEPT}
        write(out, "facts", facts)
        shutil.copy(plan.target / "config.json", out / "target.config.json")
    for path in sorted(out.glob("*.json")):
        document = json.loads(path.read_text())
        if isinstance(document, dict) and "line" in document:
            print(f"{plan.shape.name} {path.stem}: {document['line']}", flush=True)


def parts_of(
    plan: Plan, site: Path, work: Path, limit: float, only: Sequence[str] = (), rehearse: bool = False
) -> list[Part]:
    """A part for each set of servers that fit together; all write to one folder, results/SHAPE-tpN."""
    folder = work / "results" / f"{plan.shape.name}-tp{plan.tp}"
    wanted = [one for one in plan.wanted() if not only or one.start.name in only]
    absent = fa3.left_out(site, folder, [one.start.name for one in wanted], rehearse)
    wanted = [one for one in wanted if one.start.name not in absent]
    found = []
    for chunk in chunks(wanted, CARD_GB - RESERVE_GB) if wanted else ():
        name = f"{plan.shape.name}-tp{plan.tp}.{'-'.join(one.start.name for one in chunk)}"
        seconds = min(limit, START_S + sum(step.seconds for one in chunk for step in one.steps))

        def run(results: Path, chunk: list[Wanted] = chunk, seconds: float = seconds) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                place, starts = Place(work, site, plan.prompts), [one.start for one in chunk]
                if rehearse:
                    place, starts = miniature(place, starts, SWITCHED)
                steps = [step for one in chunk for step in one.steps]
                run_steps(place, starts, steps, folder, seconds - 15)
            finally:
                conclude(plan, folder)

        found.append(Part(name, run, seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["8b", "moe"])
    parser.add_argument("--only", nargs="+", default=[], metavar="SERVER", help="these servers alone")
    parser.add_argument("--rehearse", action="store_true", help="with the miniature server of the tests, without a GPU")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of this call")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    limit = args.budget - CLOSING_S - 5
    parts: list[Part] = []
    for name in args.shapes:
        parts += parts_of(Plan(SHAPES[name], args.tp, args.work), args.site, args.work, limit, args.only, args.rehearse)
    code = run_parts(parts, args.work, args.budget, packer(args.out))
    show_logs(args.work)
    sys.exit(code)


if __name__ == "__main__":
    main()
