"""The training corpus: token sequences that the target wrote, in flat arrays, and batches made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LENGTH_BUCKETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Batches are padded to the shortest of these that holds their sequences, in tokens."""

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Corpus:
    """Sequences end to end: sequence i is tokens[offsets[i]:offsets[i+1]], its answer begins at answer_start[i].

    ``greedy`` says that the answer was decoded greedily; ``held_out`` that training must not see it.
    """

    tokens: Ints
    offsets: Ints
    answer_start: Ints
    greedy: npt.NDArray[np.bool_]
    held_out: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.answer_start)

    @property
    def answer_tokens(self) -> int:
        """Tokens in all answers."""
        return int((np.diff(self.offsets) - self.answer_start).sum())

    def sequence(self, index: int) -> Ints:
        """Token ids of one sequence."""
        part: Ints = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        return part

    def frequencies(self, vocab: int) -> Ints:
        """How often each token id occurs in the training answers [vocab]."""
        position = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        counted = position >= np.repeat(self.answer_start, np.diff(self.offsets))
        counted &= np.repeat(~self.held_out, np.diff(self.offsets))
        return np.bincount(self.tokens[counted], minlength=vocab)

    def save(self, path: Path) -> None:
        """Writes the corpus as an .npz file, atomically."""
        partial = path.with_name("." + path.name + ".partial.npz")
        np.savez(
            partial,
            tokens=self.tokens.astype(np.uint32 if self.tokens.size and self.tokens.max() > 65535 else np.uint16),
            offsets=self.offsets,
            answer_start=self.answer_start,
            greedy=self.greedy,
            held_out=self.held_out,
        )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Reads what ``save`` wrote."""
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in cls.__dataclass_fields__})


def make_corpus(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], greedy: Sequence[bool], held_out: Sequence[bool]
) -> Corpus:
    """Joins prompts and answers, one each a sequence."""
    lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
    flat = [token for p, a in zip(prompts, answers, strict=True) for part in (p, a) for token in part]
    return Corpus(
        tokens=np.asarray(flat, dtype=np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        answer_start=np.asarray([len(p) for p in prompts], dtype=np.int64),
        greedy=np.asarray(greedy, dtype=np.bool_),
        held_out=np.asarray(held_out, dtype=np.bool_),
    )


def is_held_out(prompt: Sequence[int], per_mille: int) -> bool:
    """Whether a prompt is kept from training: decided by the hash of its tokens, so the same in every run."""
    digest = hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % 1000 < per_mille


def choose_draft_vocab(frequencies: Ints, size: int, always: Sequence[int]) -> npt.NDArray[np.int64]:
    """The ``size`` ids of the draft vocabulary, ascending: ``always`` and then the most frequent (ties by lower id)."""
    rank = frequencies.astype(np.float64)
    rank[list(always)] = np.inf
    order = np.lexsort((np.arange(len(rank)), -rank))
    return np.sort(order[:size]).astype(np.int64)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences on the device, with what the unrolled loss needs.

    ids [B, S]. For step j, ``rows[j]`` are flat rows b*S+t that predict token t+2+j inside the answer, and
    ``queries[j]`` the places in ``positions`` of their target distribution. ``positions`` are the flat positions, each
    once, whose target distribution is needed. ``answer_tokens`` counts step 0's rows.
    """

    ids: Tensor
    positions: Tensor
    rows: tuple[Tensor, ...]
    queries: tuple[Tensor, ...]
    answer_tokens: int


def make_batch(corpus: Corpus, members: Sequence[int], steps: int, device: torch.device) -> Batch:
    """The batch of the sequences ``members``, for ``steps`` unrolled steps."""
    lengths = [len(corpus.sequence(i)) for i in members]
    longest = max(lengths)
    width = next((bucket for bucket in LENGTH_BUCKETS if bucket >= longest), longest)
    ids = np.zeros((len(members), width), dtype=np.int64)
    wanted = np.zeros((len(members), width), dtype=np.bool_)
    firsts = np.zeros((len(members), width), dtype=np.bool_)
    for row, index in enumerate(members):
        sequence, start = corpus.sequence(index), int(corpus.answer_start[index])
        ids[row, : len(sequence)] = sequence
        # Position u has a target distribution for token u+1; row t = u-1-j draws on it.
        wanted[row, start : len(sequence) - 1] = True
        firsts[row, start - 1 : max(start - 1, len(sequence) - 2)] = True
    positions = np.flatnonzero(wanted)
    place = np.full(wanted.size, -1, dtype=np.int64)
    place[positions] = np.arange(len(positions))
    base = np.flatnonzero(firsts)
    rows, queries = [], []
    for step in range(steps):
        ahead = base % width + 1 + step < width
        found = np.where(ahead, place[np.minimum(base + 1 + step, wanted.size - 1)], -1)
        rows.append(_put(base[found >= 0], device))
        queries.append(_put(found[found >= 0], device))
    return Batch(_put(ids, device), _put(positions, device), tuple(rows), tuple(queries), len(rows[0]))


def batches(
    corpus: Corpus, batch_tokens: int, seed: int, held_out: bool, longest: int = LENGTH_BUCKETS[-1]
) -> Iterator[list[int]]:
    """One epoch: lists of sequence numbers of like length, each list at most ``batch_tokens`` padded tokens."""
    random = np.random.default_rng(seed)
    lengths = np.diff(corpus.offsets)
    usable = (corpus.held_out == held_out) & (lengths <= longest) & (lengths - corpus.answer_start >= 3)
    members = np.flatnonzero(usable)
    members = members[random.permutation(len(members))]
    buckets = np.searchsorted(np.asarray(LENGTH_BUCKETS), lengths[members])
    groups: list[list[int]] = []
    for bucket in np.unique(buckets):
        size = max(1, batch_tokens // LENGTH_BUCKETS[min(int(bucket), len(LENGTH_BUCKETS) - 1)])
        these = members[buckets == bucket].tolist()
        groups += [these[start : start + size] for start in range(0, len(these), size)]
    for pick in random.permutation(len(groups)):
        yield groups[int(pick)]


def _put(array: Ints, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
