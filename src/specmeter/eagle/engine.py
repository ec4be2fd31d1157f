"""The embedded EAGLE-3 engine: load a target and a draft head, then decode requests one at a time."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from specmeter.eagle import huge_pages as _huge_pages
from specmeter.eagle import worker as _worker
from specmeter.eagle.config import DraftConfig
from specmeter.eagle.cuda_engine import choose_device, device_layout, device_worker
from specmeter.eagle.draft import Draft
from specmeter.eagle.huge_pages import OFF, HugePages
from specmeter.eagle.layouts import choose_layout
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.settings import MAX_DRAFT_TOKENS, MAX_STEPS, Sampling, SpecSettings
from specmeter.eagle.target import Target
from specmeter.eagle.worker import Cycle, Worker
from specmeter.errors import SpecmeterError

__all__ = ["Cycle", "Engine", "Sampling", "SpecSettings"]


class Engine:
    """A target, perhaps a draft head, and the caches of one sequence. Made by ``Engine.load``."""

    def __init__(self, worker: Worker, huge_pages: HugePages = OFF) -> None:
        self.worker = worker
        self.target = worker.target
        self.draft = worker.head
        self.layout = worker.target.layout.name
        self.huge_pages = huge_pages
        self.max_context = worker.max_context
        self._busy = threading.Lock()

    @classmethod
    def load(
        cls,
        model_dir: Path,
        draft_dir: Path | None,
        *,
        dtype: str = "auto",
        threads: int | None = None,
        max_context: int = 4096,
        draft_int8: bool = False,
        device: str = "cpu",
        huge_pages: bool = True,
    ) -> Engine:
        """Loads Hugging Face style directories.

        ``dtype`` is "float32", "bfloat16", "float16" (fp16 weights under float32 activations) or "auto" (the fastest
        here, by a short timing); ``layout`` tells what was chosen. ``threads`` is the
        number of compute threads, all cores if None. ``max_context`` bounds prompt and new tokens together, and is
        lowered to what the model was trained for. ``draft_int8`` keeps the draft's output layer in 8 bits. ``device``
        is "cpu", "cuda", or "auto": CUDA where there is any. ``huge_pages`` puts the weights into huge pages on the
        CPU where the kernel does so; ``Engine.huge_pages`` tells what came of it. Raises SpecmeterError if a directory
        cannot be used, the head does not fit the target, or there is no such device.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        place = choose_device(device)
        layout = choose_layout(dtype) if place.type == "cpu" else device_layout(dtype, place, draft_int8)
        before = _huge_pages.filled_blocks() if huge_pages and place.type == "cpu" else {}
        config = None if draft_dir is None else DraftConfig.from_dir(draft_dir)
        positions = max_context + MAX_DRAFT_TOKENS + MAX_STEPS
        target = Target.from_dir(
            model_dir, capture=config.capture if config else (), positions=positions, layout=layout
        )
        draft = None
        if config is not None and draft_dir is not None:
            draft = Draft.from_dir(draft_dir, config, target, positions=positions, int8=draft_int8)
        _return_freed_memory()
        tokens = min(max_context, target.config.max_position_embeddings)
        if place.type == "cpu":
            return cls(Worker(target, draft, tokens), _huge_pages.collapse(before) if huge_pages else OFF)
        return cls(device_worker(target, draft, tokens))

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, spec: SpecSettings | None = None
    ) -> Iterator[Cycle]:
        """Decodes after ``prompt_ids`` and gives one Cycle a cycle; the first holds the token that the prompt gave.

        ``spec`` None or 0 steps is plain decoding. Closing the iterator frees the engine. Raises SpecmeterError at
        once if the request cannot be served, and at the first ``next`` if another one is in flight.
        """
        settings = spec or SpecSettings(0)
        self._check(prompt_ids, settings)
        room = min(sampling.max_tokens, self.max_context - len(prompt_ids))
        return self._run(_worker.Sequence(list(prompt_ids), sampling, settings, Sampler(sampling), room))

    def _run(self, sequence: _worker.Sequence) -> Iterator[Cycle]:
        if not self._busy.acquire(blocking=False):
            raise SpecmeterError(
                "The engine is busy.", "It decodes one request at a time.", "Close the other iterator."
            )
        try:
            cycle = self.worker.prefill(sequence)
            yield cycle
            advance = self.worker.stepper(sequence)
            while cycle.finish is None:
                cycle = advance(sequence)
                yield cycle
        finally:
            self._busy.release()

    def _check(self, prompt_ids: Sequence[int], settings: SpecSettings) -> None:
        if not prompt_ids:
            raise SpecmeterError(
                "The prompt is empty.", "There is no token to decode from.", "Send at least one token."
            )
        if len(prompt_ids) >= self.max_context:
            raise SpecmeterError(
                f"The prompt has {len(prompt_ids)} tokens.",
                f"The engine's context holds {self.max_context}, the new tokens included.",
                "Shorten the prompt or start with a larger context.",
            )
        vocab = self.target.config.vocab_size
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab:
            raise SpecmeterError(
                "The prompt has an unknown token id.", f"Ids run from 0 to {vocab - 1}.", "Correct it."
            )
        if settings.speculative_num_steps and self.draft is None:
            raise SpecmeterError(
                "Speculation is asked for but no draft head is loaded.", "", "Start with a head, or ask for 0 steps."
            )
        if self.draft is not None and settings.speculative_eagle_topk > self.draft.config.draft_vocab_size:
            raise SpecmeterError(
                f"speculative_eagle_topk is {settings.speculative_eagle_topk}.",
                f"The draft's vocabulary has {self.draft.config.draft_vocab_size} tokens.",
                "Lower it.",
            )


def _return_freed_memory() -> None:
    # Laying out the weights leaves a quarter of a GB of freed memory with the C library, which would keep it for ever.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
