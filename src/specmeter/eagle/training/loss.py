"""The unrolled loss: soft cross-entropy against the target's distribution at every step of a draft chain.

The target's probabilities are taken over its whole vocabulary and restricted to the draft vocabulary, not renormalized:
a row whose mass lies outside the draft vocabulary teaches that much less, instead of a distribution that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmeter.eagle.training.data import Batch
from specmeter.eagle.training.head import Head, Past
from specmeter.eagle.training.target import BatchedTarget

CHUNK_ROWS = 8192
"""Rows whose logits are in memory at once."""


def shifted_embeddings(target: BatchedTarget, ids: Tensor, step: int) -> Tensor:
    """Embeddings [B, S, hidden] of the token at t+1+step for each row t; rows past the end get token 0."""
    return F.embedding(F.pad(ids[:, 1 + step :], (0, 1 + step)), target.embedding)


@torch.no_grad()
def target_probabilities(
    target: BatchedTarget, final: Tensor, positions: Tensor, draft_ids: Tensor, temperature: float
) -> Tensor:
    """The target's probabilities [positions, draft vocab] of each draft token as the next one, in the compute type."""
    rows = final.reshape(-1, final.shape[-1])[positions]
    parts = []
    for chunk in torch.split(rows, CHUNK_ROWS):
        logits = target.logits(chunk).float() / temperature
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        parts.append((logits[:, draft_ids] - total).exp().to(rows.dtype))
    return torch.cat(parts)


class _SoftCrossEntropy(torch.autograd.Function):
    """sum over rows of -sum_v p(v) log q(v), q = softmax(h W^T); gradients are formed chunk by chunk in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, probabilities: Tensor, queries: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        grad_weight = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, len(hidden), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            wanted = probabilities[queries[part]].float()
            logits = F.linear(hidden[part], weight).float()
            mass = wanted.sum(-1, keepdim=True)
            log_q = torch.log_softmax(logits, dim=-1)
            total -= (wanted * log_q).sum()
            slope = (log_q.exp_() * mass - wanted).to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            grad_weight += (slope.T @ hidden[part]).float()
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0].to(grad_hidden.dtype), grad_weight * grads[0].to(grad_weight.dtype), None, None


def _soft_cross_entropy(hidden: Tensor, weight: Tensor, probabilities: Tensor, queries: Tensor) -> Tensor:
    found: Tensor = _SoftCrossEntropy.apply(hidden, weight, probabilities, queries)  # type: ignore[no-untyped-call]
    return found


def unrolled_loss(
    head: Head,
    weights: Mapping[str, Tensor],
    target: BatchedTarget,
    batch: Batch,
    states: Tensor,
    probabilities: Tensor,
    steps: int,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """The weighted loss of ``steps`` steps and each step's mean cross-entropy [steps] (detached, nats a row).

    Step j weighs decay**j, normalized over the steps.
    """
    past = Past()
    hidden = head.fuse(weights, states)
    losses = []
    for step in range(steps):
        hidden = head.step(weights, shifted_embeddings(target, batch.ids, step), hidden, past)
        rows = hidden.reshape(-1, hidden.shape[-1])[batch.rows[step]]
        normed = head.final(weights, rows)
        # The row count joins in fp32: a mean taken before the products would round small gradients away in bf16.
        summed = _soft_cross_entropy(normed, weights["lm_head.weight"], probabilities, batch.queries[step])
        losses.append(summed / max(1, len(batch.rows[step])))
    each = torch.stack(losses)
    share = torch.tensor([decay**step for step in range(steps)], device=each.device)
    return (each * share / share.sum()).sum(), each.detach()
