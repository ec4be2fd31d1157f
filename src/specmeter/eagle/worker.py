"""The worker: one sequence, and the cycle that decodes it.

A cycle is five steps: ``draft`` proposes tokens, ``verify`` runs the target over them, ``accept`` keeps some,
``extend`` runs the draft over what was kept with the target's true states, ``kv`` makes the caches agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specmeter.eagle.accept import Accepted, accept
from specmeter.eagle.draft import Draft
from specmeter.eagle.kv import KVCache, TreeMask
from specmeter.eagle.missed import Missed
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.settings import MAX_DRAFT_TOKENS, MAX_STEPS, MAX_TOPK, Sampling, SpecSettings
from specmeter.eagle.target import Target
from specmeter.eagle.tree import DraftTree, Growth, start_growth

PREFILL_ROWS = 256
"""Prompt tokens run at once."""


@dataclass(frozen=True)
class Cycle:
    """What one cycle gained: new tokens, how many tokens it drafted and how many of those were accepted.

    ``finish`` is None, "stop" (a stop token, the last one here) or "length". The last cycle of a request may hold
    fewer tokens than accepted + 1.
    """

    token_ids: list[int]
    drafted: int
    accepted: int
    finish: str | None


@dataclass
class Sequence:
    """One request in flight. ``pending`` is the last token given out, which the target has not seen yet.

    ``missed`` is where the last cycle's chain failed; None where nothing did, and for trees and drafts that were drawn.
    """

    prompt: list[int]
    sampling: Sampling
    settings: SpecSettings
    sampler: Sampler
    room: int
    pending: int = -1
    draft_hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    draft_logits: Tensor = field(default_factory=lambda: torch.empty(0))
    missed: Missed | None = None

    @property
    def missed_rank(self) -> list[int]:
        """``missed.rank``, empty where there is none: what the recipe reads of a cycle."""
        return [] if self.missed is None else self.missed.rank


@dataclass(frozen=True)
class Batch:
    """Input of one target forward: tokens and positions [rows], an additive mask or None, the first cache slot."""

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None
    start: int


@dataclass(frozen=True)
class Verified:
    """The target's answer over a draft: logits [rows, vocab] and captured states [rows, n * hidden]."""

    logits: Tensor
    states: Tensor


class Worker:
    """Owns the models' caches and masks for one sequence of at most ``max_context`` tokens."""

    def __init__(self, target: Target, draft: Draft | None, max_context: int) -> None:
        self.target = target
        self.head = draft
        self.max_context = max_context
        self.device = device = target.layout.device
        self.target_cache = target.new_cache(max_context + MAX_DRAFT_TOKENS)
        self.causal = TreeMask(PREFILL_ROWS, max_context, PREFILL_ROWS, target.dtype, device)
        self.causal.set_visible(torch.ones(PREFILL_ROWS, PREFILL_ROWS, dtype=torch.bool, device=device).tril())
        if draft is not None:
            self.draft_cache = draft.new_cache(max_context + MAX_STEPS * MAX_TOPK)
            self.verify_mask = TreeMask(MAX_DRAFT_TOKENS, max_context, MAX_DRAFT_TOKENS, target.dtype, device)
            self.draft_mask = TreeMask(MAX_TOPK, max_context, MAX_STEPS * MAX_TOPK, target.dtype, device)

    def stepper(self, sequence: Sequence) -> Callable[[Sequence], Cycle]:
        """What gives one cycle of ``sequence`` a call."""
        return self.cycle if sequence.settings.speculative_num_steps else self.decode

    # -- the start of a request ---------------------------------------------------------------------------------

    def prefill(self, sequence: Sequence) -> Cycle:
        """Runs the prompt and gives the first new token."""
        with torch.inference_mode():
            self.target_cache.length = 0
            prompt = torch.tensor(sequence.prompt, device=self.device)
            hidden, states = self._prefill_target(prompt, sequence.settings.speculative_num_steps > 0)
            sequence.pending = sequence.sampler.choose(self.target.logits(hidden)[0])
            if states is not None:
                shifted = torch.cat([prompt[1:], torch.tensor([sequence.pending], device=self.device)])
                self._prefill_draft(sequence, shifted, states)
            return self._output(sequence, [sequence.pending], drafted=0, accepted=0)

    def _prefill_target(self, prompt: Tensor, capture: bool) -> tuple[Tensor, Tensor | None]:
        captured = []
        for tokens in torch.split(prompt, PREFILL_ROWS):
            batch = self._causal_batch(tokens, self.target_cache)
            hidden, states = self._target_forward(batch, capture)
            self.target_cache.length += tokens.shape[0]
            captured.append(states)
        return hidden[-1:], torch.cat([s for s in captured if s is not None]) if capture else None

    def _prefill_draft(self, sequence: Sequence, shifted: Tensor, states: Tensor) -> None:
        draft, self.draft_cache.length = self._draft_head(), 0
        for tokens, rows in zip(torch.split(shifted, PREFILL_ROWS), torch.split(states, PREFILL_ROWS), strict=True):
            batch = self._causal_batch(tokens, self.draft_cache)
            hidden = draft.forward(
                batch.tokens, draft.fuse(rows), batch.positions, batch.mask, self.draft_cache, batch.start
            )
            self.draft_cache.length += tokens.shape[0]
        sequence.draft_hidden = hidden[-1:]
        sequence.draft_logits = draft.logits(sequence.draft_hidden)

    # -- plain decoding: the baseline step ----------------------------------------------------------------------

    def decode(self, sequence: Sequence) -> Cycle:
        """One step without speculation."""
        with torch.inference_mode():
            batch = self._causal_batch(torch.tensor([sequence.pending], device=self.device), self.target_cache)
            hidden, _ = self._target_forward(batch, capture=False)
            logits = self.target.logits(hidden)
            sequence.pending = sequence.sampler.choose(logits[0])
            self.target_cache.length += 1
            return self._output(sequence, [sequence.pending], drafted=0, accepted=0)

    # -- speculative decoding: the cycle ------------------------------------------------------------------------

    def cycle(self, sequence: Sequence) -> Cycle:
        """One cycle of speculative decoding."""
        with torch.inference_mode():
            tree = self.draft(sequence)
            verified = self.verify(tree)
            accepted = self.accept(sequence, tree, verified)
            sequence.missed = self._missed(tree, accepted)
            self.extend(sequence, verified, accepted)
            self.kv(accepted)
            return self._output(sequence, accepted.tokens, len(tree.tokens) - 1, len(accepted.path) - 1)

    def draft(self, sequence: Sequence) -> DraftTree:
        """Proposes a tree of tokens. Its first step comes from the last extend, each further one from the loop."""
        settings, head = sequence.settings, self._draft_head()
        growth = start_growth(
            sequence.draft_logits,
            sequence.draft_hidden,
            head.target_ids,
            settings.speculative_eagle_topk,
            sequence.sampler,
        )
        least = settings.speculative_draft_p_min
        for step in range(1, settings.speculative_num_steps):
            if least and growth.probability() < least:
                break
            hidden = self._draft_forward(growth, step)
            logits = head.logits(hidden)
            growth.expand(logits, hidden)
        return growth.finish(sequence.pending, settings.draft_tokens)

    def verify(self, tree: DraftTree) -> Verified:
        """Runs the target once over the whole tree."""
        batch = self._tree_batch(tree)
        hidden, states = self._target_forward(batch, capture=True)
        logits = self.target.logits(hidden)
        assert states is not None
        return Verified(logits, states)

    def accept(self, sequence: Sequence, tree: DraftTree, verified: Verified) -> Accepted:
        """Keeps what the target agrees with, and its bonus token."""
        return accept(tree, verified.logits, self._draft_head().target_ids, sequence.sampler)

    def extend(self, sequence: Sequence, verified: Verified, accepted: Accepted) -> None:
        """Runs the draft over the kept tokens with the target's true states, in place of its own guesses."""
        head = self._draft_head()
        batch = self._causal_batch(torch.tensor(accepted.tokens, device=self.device), self.draft_cache)
        sequence.draft_hidden = self._extend_forward(batch, verified.states, accepted.path)
        sequence.draft_logits = head.logits(sequence.draft_hidden)
        sequence.pending = accepted.tokens[-1]

    def kv(self, accepted: Accepted) -> None:
        """Compacts the kept path in the target's cache; whatever else the cycle wrote is dropped."""
        length = self.target_cache.length
        self.target_cache.compact([length + node for node in accepted.path])
        self.draft_cache.length += len(accepted.path)

    # -- parts of the steps -------------------------------------------------------------------------------------

    def _causal_batch(self, tokens: Tensor, cache: KVCache) -> Batch:
        rows, start = tokens.shape[0], cache.length
        mask = None if rows == 1 else self.causal.view(start, rows, rows)
        return Batch(tokens, torch.arange(start, start + rows, device=self.device), mask, start)

    def _tree_batch(self, tree: DraftTree) -> Batch:
        tokens = torch.tensor(tree.tokens, device=self.device)
        if tree.is_chain:
            return self._causal_batch(tokens, self.target_cache)
        rows, start = len(tree.tokens), self.target_cache.length
        self.verify_mask.set_visible(tree.visible())
        positions = torch.tensor(tree.depths(), device=self.device) + start
        return Batch(tokens, positions, self.verify_mask.view(start, rows, rows), start)

    def _target_forward(self, batch: Batch, capture: bool) -> tuple[Tensor, Tensor | None]:
        return self.target.forward(
            batch.tokens, batch.positions, batch.mask, self.target_cache, batch.start, capture=capture
        )

    def _draft_forward(self, growth: Growth, step: int) -> Tensor:
        # The frontier of step s sits one position after the one of step s-1; each step's rows take fresh slots.
        rows, past = growth.frontier.shape[0], self.draft_cache.length
        drafted = (step - 1) * rows
        positions = torch.full((rows,), past + step - 1, device=self.device)
        mask = None
        if growth.visible is not None:
            self.draft_mask.set_visible(growth.visible)
            mask = self.draft_mask.view(past, rows, drafted + rows)
        return self._draft_head().forward(
            growth.frontier, growth.hidden, positions, mask, self.draft_cache, past + drafted
        )

    def _extend_forward(self, batch: Batch, states: Tensor, path: list[int]) -> Tensor:
        head = self._draft_head()
        hidden = head.fuse(states[path])
        return head.forward(batch.tokens, hidden, batch.positions, batch.mask, self.draft_cache, batch.start)[-1:]

    def _missed(self, tree: DraftTree, accepted: Accepted) -> Missed | None:
        kept = len(accepted.path) - 1
        if kept >= len(tree.chosen_from):
            return None
        return Missed(tree.chosen_from[kept], self._draft_head(), accepted.tokens[kept])

    def _draft_head(self) -> Draft:
        assert self.head is not None, "Engine.generate lets no speculative request in without a draft head"
        return self.head

    def _output(self, sequence: Sequence, tokens: list[int], drafted: int, accepted: int) -> Cycle:
        finish = None
        if not sequence.sampling.ignore_eos:
            stop = next((i for i, t in enumerate(tokens) if t in sequence.sampling.stop_ids), None)
            if stop is not None:
                tokens, finish = tokens[: stop + 1], "stop"
        if len(tokens) >= sequence.room:
            tokens = tokens[: sequence.room]
            finish = finish if finish == "stop" and tokens[-1] in sequence.sampling.stop_ids else "length"
        sequence.room -= len(tokens)
        return Cycle(tokens, drafted, accepted, finish)
