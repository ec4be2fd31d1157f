"""Parts of eagle_cuda.py: models, timing by events, counting kernels."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specmeter.eagle.config import DraftConfig
from specmeter.eagle.cuda_chain import Chain
from specmeter.eagle.cuda_engine import choose_device, device_layout
from specmeter.eagle.cuda_ops import Inputs, Ops, Place
from specmeter.eagle.cuda_passes import Passes
from specmeter.eagle.cuda_worker import CudaWorker
from specmeter.eagle.draft import Draft
from specmeter.eagle.engine import Engine
from specmeter.eagle.settings import MAX_DRAFT_TOKENS, MAX_STEPS
from specmeter.eagle.target import Target

CONTEXT = 2048
# What one call of an operation launches; attention is one more where the context is split.
LAUNCHES = {"embed": 1, "qkv": 1, "attention": 1, "product": 1, "gate_up": 1, "choose": 2, "accept": 1}


@dataclass
class Models:
    """Target and draft on the GPU, and one worker for each set of operations asked for."""

    target: Target
    draft: Draft
    workers: dict[int, tuple[Ops, CudaWorker]] = field(default_factory=dict)

    @classmethod
    def load(cls, model: Path, head: Path, dtype: str) -> Models:
        """From directories."""
        layout = device_layout(dtype, choose_device("cuda"), draft_int8=False)
        config = DraftConfig.from_dir(head)
        positions = CONTEXT + MAX_DRAFT_TOKENS + MAX_STEPS
        target = Target.from_dir(model, capture=config.capture, positions=positions, layout=layout)
        return cls(target, Draft.from_dir(head, config, target, positions=positions))

    def worker(self, ops: Ops) -> CudaWorker:
        """A worker over these models with caches of its own."""
        if id(ops) not in self.workers:
            self.workers[id(ops)] = (ops, CudaWorker(self.target, self.draft, CONTEXT, ops))
        return self.workers[id(ops)][1]

    def engine(self, ops: Ops) -> Engine:
        """An engine around ``worker``."""
        return Engine(self.worker(ops))

    def target_bytes(self) -> int:
        """Bytes of weights that a plain step reads: every matrix once, the embedding as the output layer."""
        weights = self.worker_weights()
        return sum(w.numel() * w.element_size() for w in weights)

    def worker_weights(self) -> list[torch.Tensor]:
        """Every matrix of the target."""
        from specmeter.eagle.cuda_weights import target_weights

        found = target_weights(self.target, self.target.new_cache(1))
        layers = [w for layer in found.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*layers, found.output.lm_head]

    def cycle_us(self, ops: Ops, steps: int, length: int) -> float:
        """Device time of whole cycles of the engine's own graphs, at a context of about ``length``."""
        worker = self.worker(ops)
        worker.passes.clear()
        chain = Chain(worker.passes, worker.graphs, worker.mail, steps)

        def once() -> None:
            worker.passes.book.base.fill_(length)
            chain.cycle()
            worker.mail.discard()

        empty = event_time_us(lambda: worker.passes.book.base.fill_(length), 200)
        return event_time_us(once, 200) - empty


class Session:
    """What the sections share: options, the loaded models, the results so far, the clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.results: dict[str, Any] = {}
        self._models: Models | None = None

    @property
    def models(self) -> Models:
        """Target and draft in bfloat16, loaded at the first use."""
        if self._models is None:
            self._models = Models.load(self.options.model, self.options.head, "bfloat16")
        return self._models

    def left(self) -> float:
        """Seconds until --seconds are used up."""
        return float(self.options.seconds - (time.monotonic() - self.began))

    def section(self, name: str, work: Callable[[], Any]) -> None:
        """Runs one section; keeps its result or its traceback."""
        if self.options.only and name not in self.options.only:
            return
        started = time.monotonic()
        if self.left() < 2:
            result: Any = {"skipped": "no time left"}
        else:
            try:
                result = work()
            except Exception:
                result = {"error": traceback.format_exc()[-6000:]}
        self.results[name] = result
        print(json.dumps({name: result, "took_s": round(time.monotonic() - started, 2)}), flush=True)
        if self.options.out:
            self.options.out.write_text(json.dumps(self.results, indent=1))


def event_time_us(work: Callable[[], Any], count: int) -> float:
    """Median of seven of the device time of one ``work``, from ``count`` of them enqueued one after another."""
    for _ in range(3):
        work()
    found: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        for _ in range(max(1, count // 7)):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / max(1, count // 7))
    return statistics.median(found)


def counted(passes: Passes, work: Callable[[], None]) -> int:
    """Kernels that ``work`` launches, counted at the operations it calls (Triton's; torch's own launch more)."""
    real, counter = passes.ops, _Counting(passes.ops)
    passes.ops = counter
    try:
        work()
    finally:
        passes.ops = real
    return counter.launches


class _Counting:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        self.launches += LAUNCHES.get(name, 0)
        return getattr(self._ops, name)


def fused_cycle(passes: Passes, steps: int) -> None:
    """A whole cycle in one graph, to see what the gaps between the four cost."""
    passes.draft(steps)
    passes.verify(steps)
    passes.accept(steps)
    passes.extend(steps)


def layer_graphs(passes: Passes, rows: int) -> dict[str, tuple[Callable[[], None], int]]:
    """For each operation of a layer: what runs it once on every layer's weights, and how many times that is."""
    ops, layers, inner, x = passes.ops, passes.target.layers, passes.inner, passes.outputs[-1]
    place = Place(passes.book.base, 0, rows)

    def every(run: Callable[[Any], None]) -> tuple[Callable[[], None], int]:
        def work() -> None:
            for layer in layers:
                run(layer)

        return work, len(layers)

    def vocabulary() -> None:
        for _ in range(10):
            ops.choose(x, None, passes.target.output, passes.book.chosen, rows, None)

    return {
        "qkv": every(lambda w: ops.qkv(Inputs(x), w, place, inner.query)),
        "attention": every(lambda w: ops.attention(inner.query, w, place, inner.mixed)),
        "output": every(lambda w: ops.product(inner.mixed, w.output, x, inner.middle, rows)),
        "gate_up": every(lambda w: ops.gate_up(inner.middle, w, inner.active, rows)),
        "down": every(lambda w: ops.product(inner.active, w.down, inner.middle, x, rows)),
        "vocabulary": (vocabulary, 10),
    }


def random_model(folder: Path) -> Path:
    """A directory with SmolLM2-135M's shapes and random weights."""
    target = folder / "random-135m"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    hidden, wide, vocab, layers = 576, 1536, 49152, 30
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (target / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
        return drawn.to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    shapes = {"self_attn.q": (576, 576), "self_attn.k": (192, 576), "self_attn.v": (192, 576)}
    shapes |= {"self_attn.o": (576, 576), "mlp.gate": (1536, 576), "mlp.up": (1536, 576), "mlp.down": (576, 1536)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
    save_file(weights, target / "model.safetensors")
    return target
