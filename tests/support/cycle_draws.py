"""Draws through whole cycles of a small engine, shared out over the cores, and the exact chances of what they give."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specmeter.eagle import worker as worker_module
from specmeter.eagle.engine import Engine, SpecSettings
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.settings import Sampling
from specmeter.eagle.worker import Sequence, Worker
from tests.support.table_models import favour_drafts
from tests.support.tiny_eagle import VOCAB

PROMPT = [5, 1, 20, 7]
PROCESSES = 2


@dataclass(frozen=True)
class Draws:
    """``counts`` of the pairs of first tokens after ``PROMPT`` and the prefill's token ``first``; accepted drafts."""

    counts: Counter[tuple[int, int]]
    accepted: int
    first: int


def small_worker(target: Path, head: Path) -> Worker:
    """A small whole engine's worker, its draft head and caches included."""
    return Engine.load(target, head, dtype="float32", threads=1, max_context=64).worker


def draw_pairs(
    folders: tuple[Path, Path], sampling: Sampling, settings: SpecSettings, draws: int, biased: bool = False
) -> Draws:
    """``draws`` runs of cycles from one and the same prefill, in as many processes as there are cores to use.

    Every process draws by a seed of its own, so that all draws are independent; ``biased`` plants a fault in them.
    """
    each = [(folders, sampling, settings, draws // PROCESSES, share, biased) for share in range(PROCESSES)]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_share, *arguments) for arguments in each]
        found = [part.result() for part in parts]
    assert len({part.first for part in found}) == 1, "one and the same prefill"
    counts = sum((part.counts for part in found), Counter[tuple[int, int]]())
    return Draws(counts, sum(part.accepted for part in found), found[0].first)


def _share(
    folders: tuple[Path, Path], sampling: Sampling, settings: SpecSettings, draws: int, share: int, biased: bool
) -> Draws:
    if biased:  # this process ends with its share
        worker_module.accept = favour_drafts
    return draw(small_worker(*folders), sampling, settings, draws, share + 1)


def draw(worker: Worker, sampling: Sampling, settings: SpecSettings, draws: int, share: int = 0) -> Draws:
    """The draws of one process; ``share`` above 0 draws by another seed after the prefill."""
    sequence = Sequence(PROMPT, sampling, settings, Sampler(sampling), room=10**9)
    worker.prefill(sequence)
    if share:
        sequence.sampler = Sampler(replace(sampling, seed=(sampling.seed or 0) + 1000 * share))
    start = vars(sequence).copy()
    counts, accepted = Counter[tuple[int, int]](), 0
    for _ in range(draws):
        vars(sequence).update(start)
        worker.target_cache.length = worker.draft_cache.length = len(PROMPT)
        tokens: list[int] = []
        while len(tokens) < 2:
            cycle = worker.cycle(sequence)
            accepted += cycle.accepted
            tokens += cycle.token_ids
        counts[tokens[0], tokens[1]] += 1
    return Draws(counts, accepted, int(start["pending"]))


def exact_pairs(worker: Worker, sampling: Sampling, first: int) -> np.ndarray:
    """The exact probability of each pair after ``PROMPT`` and ``first``, [vocab, vocab], from plain forwards."""

    def following(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            worker.target_cache.length = 0
            hidden, _ = worker._prefill_target(torch.tensor(tokens), capture=False)
            return Sampler(sampling).distribution(worker.target.logits(hidden)[0]).double()

    seen = [*PROMPT, first]
    rows = torch.stack([following([*seen, token]) for token in range(VOCAB)])
    return (following(seen)[:, None] * rows).numpy()
