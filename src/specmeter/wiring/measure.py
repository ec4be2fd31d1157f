"""What a wiring is worth on a bench: accepted drafts, and the loss against the target's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specmeter.wiring.numeric import Bench, Unroller


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts of the judged rows, in order of decoding, with the sequence of each."""

    counts: Tensor
    line: Tensor
    steps: int

    def per_position(self) -> tuple[float, ...]:
        """Share of rows whose first j drafts are all accepted, j = 1..steps."""
        return tuple(float((self.counts >= j).float().mean()) for j in range(1, self.steps + 1))

    def accept_length(self) -> float:
        """Tokens gained a cycle, the bonus token included, over the cycles that real decoding would run."""
        cycles = tokens = at = 0
        counts, line = self.counts.tolist(), self.line.tolist()
        while at < len(counts):
            gained = 1 + counts[at]
            cycles, tokens, start = cycles + 1, tokens + gained, at
            at += gained
            # A cycle that runs over the end of a sequence starts the next one at its first row.
            while start < min(at, len(line) - 1) and line[start] == line[start + 1]:
                start += 1
            at = min(at, start + 1)
        return tokens / cycles if cycles else 0.0


def acceptance(unroller: Unroller, hidden: Tensor, target_ids: Tensor | None = None) -> Acceptance:
    """Acceptance of a wiring given by the hidden input of the head [rows, hidden]."""
    bench = unroller.bench
    ids = bench.head.target_ids if target_ids is None else target_ids
    counts = unroller.accepted(hidden, ids)
    return Acceptance(counts[bench.judged], bench.line[bench.judged], unroller.steps)


@torch.inference_mode()
def fuse(bench: Bench, states: Sequence[int], normalise: bool = False) -> Tensor:
    """The head's hidden input [rows, hidden] for states k of H[k] in this order."""
    parts = [bench.states[k] for k in states]
    if normalise:
        parts = [F.rms_norm(part, part.shape[-1:], eps=1e-6) for part in parts]
    return bench.head.fuse(torch.cat(parts, dim=-1))


class SoftLoss:
    """Cross-entropy of the head's first draft against the target's distribution over the draft vocabulary.

    This is what a head is trained on. Paired over rows it tells neighbouring layers apart on far less text than hits
    and misses do.
    """

    def __init__(self, bench: Bench, unroller: Unroller) -> None:
        self._bench = bench
        self._unroller = unroller
        rows = torch.arange(len(bench.ids))
        following = (rows + 1).clamp(max=len(rows) - 1)
        self.rows = torch.nonzero(bench.judged & (bench.line[following] == bench.line)).flatten()
        self._wanted = self._distribution(following[self.rows])

    @torch.inference_mode()
    def of(self, hidden: Tensor) -> Tensor:
        """The loss at every judged row [judged] for the head's hidden input [rows, hidden]."""
        output = self._unroller.first(hidden)[self.rows]
        logits = self._bench.head.logits(output).float()
        return torch.logsumexp(logits, dim=-1) - (self._wanted * logits).sum(-1)

    @torch.inference_mode()
    def _distribution(self, rows: Tensor) -> Tensor:
        """The target's next-token distribution at rows, over the draft vocabulary [rows, draft vocabulary]."""
        parts = [
            self._bench.target.logits(part)[:, self._bench.head.target_ids].float().softmax(-1)
            for part in torch.split(self._bench.states[-1][rows], 256)
        ]
        return torch.cat(parts)


def in_errors(difference: Tensor) -> float:
    """The mean of paired differences in standard errors of that mean; 0 when they do not vary."""
    spread = float(difference.std()) / len(difference) ** 0.5
    return float(difference.mean()) / spread if spread > 0 else 0.0
