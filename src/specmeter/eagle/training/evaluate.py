"""Chain acceptance of a head: how many of its k greedy draft tokens the target's greedy decoding would keep.

Exact for sequences whose answers were decoded greedily: the draft at row t gets the true states up to t and token
t+1, rolls out k tokens on its own tokens and states, and its first j tokens are accepted if they equal x[t+2..t+1+j].
Two averages are given. *Per position*: over all rows. *Per cycle*: over the rows at which a real decoding would start a
cycle (one that accepts a tokens is followed by one a+1 rows later): the accept length that a server shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from specmeter.eagle.training.data import Batch, Corpus, make_batch
from specmeter.eagle.training.head import Head, Past
from specmeter.eagle.training.loss import shifted_embeddings
from specmeter.eagle.training.target import BatchedTarget


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts of rows in order of decoding, one array a sequence: values 0..steps."""

    steps: int
    accepted: list[npt.NDArray[np.int64]]

    def per_position(self) -> list[float]:
        """Cumulative chance that the first j drafts are accepted, j = 1..steps, over all rows."""
        joined = np.concatenate(self.accepted) if self.accepted else np.zeros(0, dtype=np.int64)
        return [float((joined >= j).mean()) if len(joined) else 0.0 for j in range(1, self.steps + 1)]

    def accept_length(self, k: int) -> float:
        """AL of k draft steps averaged over positions: 1 + accepted drafts."""
        return 1.0 + sum(self.per_position()[:k])

    def cycle_accept_length(self, k: int) -> float:
        """AL of k draft steps over the cycles of a real decoding: tokens gained per cycle, the bonus token included."""
        cycles = tokens = 0
        for line in self.accepted:
            at = 0
            while at < len(line):
                gained = 1 + min(k, int(line[at]))
                cycles, tokens, at = cycles + 1, tokens + gained, at + gained
        return tokens / cycles if cycles else 0.0

    def summary(self) -> dict[str, Any]:
        """The figures as plain lists, rounded to 4 places: index k-1 is k draft steps."""
        ks = range(1, self.steps + 1)
        return {
            "rows": int(sum(len(line) for line in self.accepted)),
            "sequences": len(self.accepted),
            "acceptance_per_step": [round(value, 4) for value in self.per_position()],
            "accept_length_per_position": [round(self.accept_length(k), 4) for k in ks],
            "accept_length_per_cycle": [round(self.cycle_accept_length(k), 4) for k in ks],
        }


@torch.no_grad()
def chain_acceptance(
    head: Head, target: BatchedTarget, corpus: Corpus, groups: Iterable[Sequence[int]], steps: int
) -> Acceptance:
    """Acceptance over the sequences of ``corpus`` in ``groups`` (batches of sequence numbers)."""
    weights = {name: tensor.detach() for name, tensor in head.cast().items()}
    accepted: list[npt.NDArray[np.int64]] = []
    for members in groups:
        batch = make_batch(corpus, members, 1, target.device)
        counts = _roll_out(head, weights, target, batch, steps).cpu().numpy()
        rows = batch.rows[0].cpu().numpy()
        width = batch.ids.shape[1]
        for row, index in enumerate(members):
            # The first cycle starts once the first answer token is known: row answer_start - 1.
            these = rows[rows // width == row]
            if len(these):
                accepted.append(counts[these[these % width >= int(corpus.answer_start[index]) - 1]])
    return Acceptance(steps, accepted)


def _roll_out(head: Head, weights: dict[str, Tensor], target: BatchedTarget, batch: Batch, steps: int) -> Tensor:
    """Accepted drafts of every flat row [B * S] of a batch."""
    states, _ = target.states(batch.ids, head.shape.capture)
    past = Past()
    hidden = head.fuse(weights, states)
    embedded = shifted_embeddings(target, batch.ids, 0)
    running = torch.ones(batch.ids.numel(), dtype=torch.bool, device=batch.ids.device)
    count = torch.zeros_like(running, dtype=torch.long)
    for step in range(steps):
        hidden = head.step(weights, embedded, hidden, past)
        normed = head.final(weights, hidden)
        drafted = head.draft_ids[_argmax(normed, weights["lm_head.weight"])]
        truth = F.pad(batch.ids[:, 2 + step :], (0, 2 + step), value=-1)
        running &= (drafted == truth).reshape(-1)
        count += running
        embedded = F.embedding(drafted, target.embedding)
    return count


def _argmax(normed: Tensor, weight: Tensor) -> Tensor:
    flat = normed.reshape(-1, normed.shape[-1])
    return torch.cat([F.linear(part, weight).argmax(-1) for part in torch.split(flat, 16384)]).view(normed.shape[:2])
