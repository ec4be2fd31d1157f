"""What eight_gpu.py serves: SGLang's arms over N cards, and two rehearsals without a card.

Arms of SGLang: plain decoding, the default 3 steps, other step counts that choose the tuned one (one start each, since
a running SGLang with several ranks takes no other step count), the tuned steps in starts of their own, and these with
other communication: NCCL instead of custom all-reduce, and NCCL with the low-latency protocol. A mixture of experts
has one more, which says how many experts of a layer the tokens of the speculative text reach. The draft alone runs on
one card, before a few layers of the target.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpu_client import Load, Prompt, id_prompts
from gpu_fleet import Place, Start, eagle
from gpu_models import SHAPES, Shape, write_models
from sglang_dummy_gpu import FIRST_VERSION, SIMULATED, Plan

DEFAULT, FALLBACK = 3, 2
SCREENED = (1, 2, 5)
# EAGLE-3 captures states of layers 2, n / 2 and n - 3, so a target needs a few.
DRAFT_LAYERS = 8
DEEP_CYCLES = 100
# The 200B-class mixture has 443 GB of dummy weights to draw and graphs of 61 layers to capture on every rank.
START_S = 340.0
LOADS = {"1": Load(rounds=3, tokens=160), "8": Load(rounds=2, tokens=128, at_once=8, prompts=8)}
SMALL = {"1": Load(rounds=2, tokens=360, prompts=3)}
SLOW = {"1": Load(rounds=1, tokens=32, prompts=3), "8": Load(rounds=1, tokens=8, at_once=8, prompts=8)}
MINI = Path(__file__).resolve().parents[1] / "tests" / "support" / "mini_ranks"
# Its heads, kv heads, widths and vocabulary divide by 2, 3 and 4.
TWELFTHS = Shape("twelfths", 8, 384, 1536, 12, 12, head_dim=64, vocab=4608)
Words = tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """One way to serve. ``command`` gets the tuned step count; ``about`` is for the report, ``{k}`` being that count.

    ``role``: ``plain`` (no speculation), ``speed``, ``screen`` (its speed chooses the tuned steps; first round only),
    ``experts`` (counts them; first round only, no probes).
    """

    name: str
    about: str
    command: Callable[[int], Words]
    role: str = "speed"
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> bool:
        """Whether it drafts."""
        return self.role in ("speed", "screen")

    @property
    def once(self) -> bool:
        """Whether it is started in the first round alone."""
        return self.role in ("screen", "experts")


@dataclass(frozen=True)
class Body:
    """A server as measured: its arms at one size. ``deep`` cycles under the profiler (0: it cannot be had).

    ``start_s`` is what a start may take, ``step_s`` a measurement where there is no profiler.
    """

    name: str
    place: Place
    arms: tuple[Arm, ...]
    loads: Mapping[str, Load]
    deep: int
    start_s: float
    shape: Shape | None = None
    step_s: float = 30.0

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What is asked."""
        return self.place.prompts

    def start(self, arm: Arm, tuned: int) -> Start:
        """The server of an arm."""
        return Start(arm.name, arm.command(tuned), arm.env, linked=arm.role != "experts")


def tuned_steps(body: Body, results: Path) -> int:
    """The step count of the tuned arms: that of the fastest start of the default and screened ones.

    Chosen once and kept in RESULTS/steps-BODY.json, so that all starts of an arm are alike; ``FALLBACK`` where none of
    them was measured.
    """
    kept = results / f"steps-{body.name}.json"
    if kept.is_file():
        return int(json.loads(kept.read_text())["tuned"])
    rates: dict[int, float] = {}
    for arm, k in (("default", DEFAULT), *((f"steps{k}", k) for k in SCREENED)):
        path = results / f"{body.name}.{arm}.1" / "phases1.json"
        rate = json.loads(path.read_text())["client"]["decode_tok_s_median"] if path.is_file() else None
        if rate:
            rates[k] = float(rate)
    tuned = max(rates, key=lambda k: rates[k]) if rates else FALLBACK
    why = "the fastest of one start each" if len(rates) > 1 else "nothing to choose from was measured"
    if len(rates) < 2:
        tuned = FALLBACK
    kept.write_text(json.dumps({"tuned": tuned, "tok_s": rates, "why": why}) + "\n")
    return tuned


def sglang_bodies(site: Path, work: Path, shapes: Sequence[str], sizes: Sequence[int]) -> list[Body]:
    """The shapes at each tensor parallel size, and the draft of each shape alone on one card."""
    found = []
    for name in shapes:
        shape = SHAPES[name]
        for tp in sizes:
            plan = Plan(shape, tp, work)
            place = Place(work, site, plan.prompts)
            found.append(Body(f"{name}-tp{tp}", place, _arms(plan), LOADS, DEEP_CYCLES, START_S, shape))
        alone = Plan(replace(shape, name=f"{name}-draft", layers=DRAFT_LAYERS), 1, work)
        found.append(Body(f"{name}-draft-tp1", Place(work, site, alone.prompts), (_draft(alone),), LOADS,
                          DEEP_CYCLES, START_S))  # fmt: skip
    return found


def _draft(plan: Plan) -> Arm:
    words = plan.command(*eagle(plan.head, DEFAULT))
    return Arm("draft", "the draft alone, before a few layers", lambda _tuned: words, env=dict(SIMULATED))


def _arms(plan: Plan) -> tuple[Arm, ...]:
    base, alone = dict(FIRST_VERSION), "--disable-custom-all-reduce"
    spec = {**base, **SIMULATED}

    def steps(k: int | None, *more: str) -> Callable[[int], Words]:
        return lambda tuned: (*plan.command(*eagle(plan.head, tuned if k is None else k)), *more)

    arms = [
        Arm("plain", "no speculation", lambda _tuned: plan.command(), "plain", base),
        Arm("default", f"{DEFAULT} steps", steps(DEFAULT), env=spec),
        *(Arm(f"steps{k}", f"{k} steps, to choose", steps(k), "screen", spec) for k in SCREENED),
        Arm("tuned", "{k} steps", steps(None), env=spec),
        Arm("nccl", "{k} steps, NCCL instead of custom all-reduce", steps(None, alone), env=spec),
        Arm("nccl-ll", "{k} steps, NCCL with NCCL_PROTO=LL", steps(None, alone), env={**spec, "NCCL_PROTO": "LL"}),
    ]
    if plan.shape.experts:
        # The radix cache would skip the prefill that tells the experts.
        words = plan.command("--enable-return-routed-experts", "--disable-radix-cache")
        arms.append(Arm("experts", "experts reached", lambda _tuned: words, "experts", base))
    return tuple(arms)


def mini_bodies(work: Path, sizes: Sequence[int]) -> list[Body]:
    """Miniature ranks: the whole control flow, without a GPU, a profiler or a model."""
    lib = work / "lib"
    if not lib.exists():
        shutil.copytree(MINI / "minitp", lib / "minitp", ignore=shutil.ignore_patterns("__pycache__"))
        (lib / "minitp-1.0.dist-info").mkdir()
        (lib / "minitp-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: minitp\nVersion: 1.0\n")
    place = Place(work, lib, (tuple(range(8)), tuple(range(4, 12)), tuple(range(9))), None, MINI / "minitp.toml")

    def steps(tp: int, k: int | None) -> Callable[[int], Words]:
        front = (sys.executable, "-u", str(MINI / "front.py"), "--tp", str(tp), "--steps")
        return lambda tuned: (*front, str(tuned if k is None else k))

    return [
        Body(
            f"mini-tp{tp}", place,
            (
                Arm("plain", "no speculation", steps(tp, 0), "plain"),
                Arm("default", f"{DEFAULT} steps", steps(tp, DEFAULT)),
                Arm("tuned", "{k} steps", steps(tp, None)),
            ),
            SMALL, 0, 40.0, None, 2.0,
        )
        for tp in sizes
    ]  # fmt: skip


def vllm_bodies(python: Path, work: Path, sizes: Sequence[int]) -> list[Body]:
    """vLLM on CPUs at each size, and the draft alone: real ranks, dummy weights.

    Acceptance is what these weights give: vLLM's synthetic one asserts that it is not on a CPU (0.32.0).
    """
    target, head = write_models(work / "models", TWELFTHS)
    place = Place(work, None, id_prompts(TWELFTHS.vocab, length=24), "vllm")
    bodies = []
    for tp in sizes:
        arms = [Arm("plain", "no speculation", _vllm(python, target, head, tp, 0), "plain", _cpus(tp))]
        for name, k, role in (("default", DEFAULT, "speed"), ("steps2", 2, "screen"), ("tuned", None, "speed")):
            about = f"{k or '{k}'} steps"
            arms.append(Arm(name, about, _vllm(python, target, head, tp, k), role, _cpus(tp)))
        bodies.append(Body(f"twelfths-tp{tp}", place, tuple(arms), SLOW, 0, 240.0, None, 40.0))
    draft = Arm("draft", "the draft alone", _vllm(python, target, head, 1, DEFAULT), env=_cpus(1))
    return [*bodies, Body("twelfths-draft-tp1", place, (draft,), SLOW, 0, 240.0, None, 40.0)]


def _vllm(python: Path, target: Path, head: Path, tp: int, k: int | None) -> Callable[[int], Words]:
    words = (
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--load-format", "dummy",
        "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--gpu-memory-utilization", "0.2", "--tensor-parallel-size", str(tp),
    )  # fmt: skip

    def command(tuned: int) -> Words:
        steps = tuned if k is None else k
        if not steps:
            return words
        config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": steps}
        return (*words, "--speculative-config", json.dumps(config))

    return command


def _cpus(tp: int) -> dict[str, str]:
    """A thread a rank; the ranks share the cores where there are fewer."""
    bind = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(tp))
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind}
