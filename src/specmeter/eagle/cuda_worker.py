"""The worker on a device: greedy decoding of chains without a look at the host, everything else as on the CPU.

A cycle's graphs read their input where the cycle before left it, on the device. So the next cycle is put on the stream
before the result of this one is read (run-ahead by one), and the device does not wait for the host. What a request's
end leaves on the stream is harmless: it writes beyond the length, and the next prompt's work comes after it.

Sampling, trees, drafts that may end early and chains of more than 15 steps take the CPU's path over the same weights
and caches on the device; there the host looks at each cycle's outcome several times.
"""

from __future__ import annotations

from collections.abc import Callable

from specmeter.eagle.cuda_chain import Chain, PlainStep
from specmeter.eagle.cuda_graphs import Graphs, Mail
from specmeter.eagle.cuda_ops import LANES, Ops
from specmeter.eagle.cuda_passes import Passes
from specmeter.eagle.cuda_weights import draft_weights, target_weights
from specmeter.eagle.draft import Draft
from specmeter.eagle.target import Target
from specmeter.eagle.worker import Cycle, Sequence, Worker

AHEAD = 1
"""Cycles put on the stream beyond the one whose result is waited for."""
SHORT_CONTEXT = 512
"""Tokens up to which one program a head walks the context; beyond, it is split among SPLITS."""
SPLITS = 8


class CudaWorker(Worker):
    """A Worker whose greedy chains run as graphs, where the device has graphs."""

    def __init__(self, target: Target, draft: Draft | None, max_context: int, ops: Ops) -> None:
        super().__init__(target, draft, max_context)
        weights = target_weights(target, self.target_cache)
        head = None if draft is None else draft_weights(draft, self.draft_cache)
        self.ops = ops
        self.passes = Passes(ops, weights, head)
        self.graphs = Graphs(self.device)
        self.mail = Mail(LANES + 1, self.device)
        self.ahead = AHEAD
        self._prepared: dict[tuple[int, int], Chain | PlainStep] = {}
        self._most_in_cache = 0

    def prefill(self, sequence: Sequence) -> Cycle:
        """Runs the prompt and gives the first new token."""
        # Whatever is under way belongs to a request that ended; and graphs are made before the caches hold anything.
        self.mail.discard()
        if graphed(sequence):
            self.prepare(drafts(sequence), len(sequence.prompt) + sequence.room)
        cycle = super().prefill(sequence)
        if graphed(sequence):
            length = len(sequence.prompt)
            self.passes.begin(sequence.pending, length, sequence.draft_logits, sequence.draft_hidden)
            self._most_in_cache = length
        return cycle

    def stepper(self, sequence: Sequence) -> Callable[[Sequence], Cycle]:
        """What gives one cycle of ``sequence`` a call."""
        if not graphed(sequence):
            return super().stepper(sequence)
        return self.chain_cycle if drafts(sequence) else self.plain_step

    def plain_step(self, sequence: Sequence) -> Cycle:
        """One step without speculation."""
        self._put(sequence, 0)
        return self._received(sequence, 0)

    def chain_cycle(self, sequence: Sequence) -> Cycle:
        """One cycle of speculative decoding. What is put on the stream here is mostly a later cycle's work."""
        steps = drafts(sequence)
        self._put(sequence, steps)
        return self._received(sequence, steps)

    def prepare(self, steps: int, tokens: int) -> None:
        """Makes the passes for ``steps`` drafts and a context of ``tokens``; overwrites the caches' first slots."""
        most = tokens + (1 + self.ahead) * (steps + 1)
        for splits in (1, SPLITS) if most > SHORT_CONTEXT else (1,):
            if (steps, splits) in self._prepared:
                continue
            self.passes.clear()
            self._prepared[steps, splits] = (
                Chain(self.passes, self.graphs, self.mail, steps, splits)
                if steps
                else PlainStep(self.passes, self.graphs, self.mail, splits)
            )

    def _put(self, sequence: Sequence, steps: int) -> None:
        # A cycle gives at least one token: no more of them than are certain to be needed, and one at least.
        while len(self.mail) < min(1 + self.ahead, sequence.room):
            self._most_in_cache += steps + 1
            self._prepared[steps, 1 if self._most_in_cache <= SHORT_CONTEXT else SPLITS].cycle()

    def _received(self, sequence: Sequence, steps: int) -> Cycle:
        kept, *chosen = self.mail.take()
        # Until now all its drafts were taken for kept.
        self._most_in_cache -= steps - kept
        for cache in (self.target_cache,) if self.head is None else (self.target_cache, self.draft_cache):
            cache.length += kept + 1
        return self._output(sequence, chosen[: kept + 1], steps, kept)


def graphed(sequence: Sequence) -> bool:
    """True if the request is one that the graphs decode: greedy, a chain or no draft, every step always drafted."""
    settings = sequence.settings
    chain = settings.speculative_eagle_topk == 1 and not settings.speculative_draft_p_min
    return sequence.sampling.greedy and (not settings.speculative_num_steps or (chain and drafts(sequence) < LANES))


def drafts(sequence: Sequence) -> int:
    """Drafts a cycle verifies: a chain is not drafted beyond what is verified."""
    settings = sequence.settings
    return settings.draft_tokens - 1 if settings.speculative_num_steps else 0
