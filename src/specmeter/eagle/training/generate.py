"""Generation of thousands of sequences in lockstep: the data that a head is trained on.

Rows have their own positions, so prompts of different lengths share a batch without left padding. Finished rows are
dropped by compacting the batch. On CUDA a decode step is captured as a graph for each (rows, key bucket); where capture
fails, steps run eagerly and the reason is printed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specmeter.eagle.training.target import BatchedTarget, causal_attention

KEY_BUCKET = 128
CHECK_EVERY = 16
LOOP_WINDOW = 64
LONGEST_PERIOD = 24
PREFILL_TOKENS = 65536


@dataclass(frozen=True)
class Job:
    """One sequence to continue: prompt token ids, sampling temperature (0 means greedy), most new tokens."""

    prompt: list[int]
    temperature: float


@dataclass(frozen=True)
class Answer:
    """What came of the job with index ``job``: new token ids, the end token included if it came (``ended``)."""

    job: int
    tokens: list[int]
    ended: bool


class Generator:
    """Continues prompts in large batches with one target model.

    ``batch`` is the most rows at once; ``kv_bytes`` bounds the key-value cache, so long prompts get fewer rows.
    ``min_p`` drops tokens below that share of the likeliest token's probability when sampling. Sampling draws from
    torch's default generator: seed it for repeatable data.
    """

    def __init__(
        self,
        target: BatchedTarget,
        end_ids: Sequence[int],
        batch: int,
        kv_bytes: int,
        min_p: float = 0.03,
        say: Callable[[str], None] = print,
    ) -> None:
        self.target = target
        self.end_ids = torch.tensor(list(end_ids), device=target.device)
        self.batch = batch
        self.kv_bytes = kv_bytes
        self.log_min_p = float(np.log(min_p))
        self.say = say
        self.graphs = target.device.type == "cuda"
        self.arena: list[Tensor] = []
        self.captured: dict[tuple[int, int, int, int], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        device = target.device
        self.position = torch.zeros(batch, dtype=torch.long, device=device)
        self.temperature = torch.zeros(batch, 1, device=device)
        self.token = torch.zeros(batch, dtype=torch.long, device=device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.slot = torch.zeros(batch, dtype=torch.long, device=device)
        self.row = torch.arange(batch, device=device)

    def run(self, jobs: Sequence[Job], max_new: int, deadline: float = float("inf")) -> Iterator[Answer]:
        """Continues every job by up to ``max_new`` tokens; stops between batches past ``deadline`` (monotonic s)."""
        order = sorted(range(len(jobs)), key=lambda index: len(jobs[index].prompt))
        groups: list[list[int]] = []
        while order:
            longest = len(jobs[order[-1]].prompt) + max_new
            rows = max(
                1, min(self.batch, self.kv_bytes // (self._token_bytes() * _bucket(longest + 1, 2 * KEY_BUCKET)))
            )
            groups.append(order[-rows:])
            del order[-rows:]
        # A cut by the deadline must not drop one kind of prompt: groups run in random order.
        picks = np.random.default_rng(len(jobs)).permutation(len(groups))
        for pick in picks:
            if time.monotonic() > deadline:
                return
            group = groups[int(pick)]
            yield from self._group([jobs[index] for index in group], group, max_new, deadline)

    def caches(self, rows: int, keys: int) -> list[tuple[Tensor, Tensor]]:
        """Key and value caches of each layer, [rows, kv heads, keys, d], views of one arena that stays in place.

        One arena lets graphs captured for one group serve the next; a larger request replaces it and drops them.
        """
        config, like = self.target.config, self.target.embedding
        shape = (rows, config.num_key_value_heads, keys, config.head_dim)
        size = rows * config.num_key_value_heads * keys * config.head_dim
        if not self.arena or self.arena[0].numel() < size:
            # The pool dies with its last graph: one captured into a dead pool fails.
            self.captured.clear()
            self.pool = None
            self.arena.clear()
            # Zeros, because a masked key is multiplied by 0 and memory as it comes may hold NaN.
            self.arena = [
                torch.zeros(size, device=like.device, dtype=like.dtype) for _ in range(2 * len(self.target.layers))
            ]
        views = [flat[:size].view(shape) for flat in self.arena]
        return list(zip(views[::2], views[1::2], strict=True))

    def release(self) -> None:
        """Gives the cache's memory and the graphs back; the next run makes them anew."""
        self.captured.clear()
        self.arena.clear()
        self.pool = None
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _token_bytes(self) -> int:
        config = self.target.config
        per_layer = 2 * config.num_key_value_heads * config.head_dim
        return per_layer * config.num_hidden_layers * self.target.embedding.element_size()

    @torch.no_grad()
    def _group(self, jobs: list[Job], numbers: list[int], max_new: int, deadline: float) -> Iterator[Answer]:
        batch = _Batch(self, jobs, max_new)
        batch.prefill(jobs)
        batch.decode(deadline)
        yield from batch.answers(numbers)


class _Batch:
    """The static tensors of one group: caches [rows, kv heads, keys, d] per layer, and a row each of state."""

    def __init__(self, owner: Generator, jobs: list[Job], max_new: int) -> None:
        target, device = owner.target, owner.target.device
        self.owner, self.target, self.max_new = owner, target, max_new
        self.rows = len(jobs)
        lengths = torch.tensor([len(job.prompt) for job in jobs], device=device)
        self.longest_prompt = max(len(job.prompt) for job in jobs)
        needed = self.longest_prompt + max_new + 1
        self.keys = _bucket(needed, 2 * KEY_BUCKET)
        self.cache = owner.caches(self.rows, self.keys)
        self.full_rows = self.rows
        # State of fixed address, shared by all groups: captured graphs read and write it.
        self.position, self.temperature, self.token = owner.position, owner.temperature, owner.token
        self.done, self.slot, self.row = owner.done, owner.slot, owner.row
        self.position[: self.rows] = lengths
        self.temperature[: self.rows, 0] = torch.tensor([job.temperature for job in jobs], device=device)
        self.done.zero_()
        self.slot.copy_(self.row)
        self.was_done = self.done.clone()
        self.output = torch.full((self.rows, max_new), -1, dtype=torch.int32, device=device)

    def prefill(self, jobs: list[Job]) -> None:
        """Runs the prompts, fills the caches and samples the first token of each row."""
        length = self.longest_prompt
        ids = torch.zeros(self.rows, length, dtype=torch.long)
        for row, job in enumerate(jobs):
            ids[row, : len(job.prompt)] = torch.tensor(job.prompt)
        ids = ids.to(self.target.device)
        step = max(1, PREFILL_TOKENS // length)
        rope = (self.target.cos[:length], self.target.sin[:length])
        for start in range(0, self.rows, step):
            part = slice(start, min(start + step, self.rows))
            hidden = F.embedding(ids[part], self.target.embedding)
            for layer, (keys, values) in zip(self.target.layers, self.cache, strict=True):
                q, k, v = self.target.project(layer, hidden, rope)
                keys[part, :, :length] = k
                values[part, :, :length] = v
                hidden = self.target.finish(layer, hidden, causal_attention(q, k, v))
            last = hidden[torch.arange(hidden.shape[0], device=hidden.device), self.position[part] - 1]
            self._take(last, part)
        self.output[:, 0] = self.token[: self.rows].to(torch.int32)

    def decode(self, deadline: float) -> None:
        """Steps all rows until few are left; past ``deadline`` the rest is cut off where it is."""
        active = self.rows
        few = max(1, self.rows // 32)
        started = self.rows
        for step in range(1, self.max_new):
            if step % CHECK_EVERY == 0:
                self._mark_loops(step)
                active = int((~self.done[: self.rows]).sum())
                if (active < few and started > 32) or active == 0 or time.monotonic() > deadline:
                    break
                self._compact(active)
            self._step(min(self.keys, _bucket(self.longest_prompt + step, KEY_BUCKET)))
            self.output[self.slot[: self.rows], step] = torch.where(
                self.done[: self.rows] & self.was_done, -1, self.token[: self.rows]
            ).to(torch.int32)

    def answers(self, numbers: list[int]) -> Iterator[Answer]:
        """One Answer a row, in the order of the jobs."""
        ends = set(self.owner.end_ids.tolist())
        for number, line in zip(numbers, self.output.cpu().numpy(), strict=True):
            tokens = line[: int(np.argmax(line < 0))] if (line < 0).any() else line
            found: list[int] = tokens.tolist()
            yield Answer(number, found, bool(found) and found[-1] in ends)

    def _step(self, keys: int) -> None:
        self.was_done = self.done[: self.rows].clone()
        if not self.owner.graphs:
            return self._advance(self.rows, keys)
        shape = (self.full_rows, self.keys, self.rows, keys)
        graph = self.owner.captured.get(shape)
        if graph is None:
            graph = self._capture(keys)
            if graph is None:
                return self._advance(self.rows, keys)
            self.owner.captured[shape] = graph
        graph.replay()
        return None

    def _capture(self, keys: int) -> torch.cuda.CUDAGraph | None:
        state = (self.position, self.token, self.done)
        saved = [tensor.clone() for tensor in state]
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._advance(self.rows, keys)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.owner.pool):
                self._advance(self.rows, keys)
            self.owner.pool = graph.pool()
        except Exception as error:
            self.owner.say(f"decode graphs are off, steps run eagerly: {type(error).__name__}: {error}")
            self.owner.graphs = False
            torch.cuda.synchronize()
            graph = None
        for tensor, old in zip(state, saved, strict=True):
            tensor.copy_(old)
        return graph

    def _advance(self, rows: int, keys: int) -> None:
        """One decode step of the first ``rows`` rows over the first ``keys`` cache slots, in place."""
        target, position = self.target, self.position[:rows]
        row = self.row[:rows]
        hidden = F.embedding(self.token[:rows], target.embedding)[:, None]
        rope = (target.cos[position][:, None, None], target.sin[position][:, None, None])
        unseen = torch.arange(keys, device=position.device)[None] > position[:, None]
        bias = torch.zeros(rows, 1, 1, keys, device=position.device, dtype=hidden.dtype)
        bias.masked_fill_(unseen[:, None, None], float("-inf"))
        for layer, (all_keys, all_values) in zip(target.layers, self.cache, strict=True):
            q, k, v = target.project(layer, hidden, rope)
            all_keys[row, :, position] = k[:, :, 0]
            all_values[row, :, position] = v[:, :, 0]
            attended = _decode_attention(q, all_keys[:rows, :, :keys], all_values[:rows, :, :keys], bias)
            hidden = target.finish(layer, hidden, attended)
        position.add_(1).clamp_(max=self.keys - 1)
        self._take(hidden[:, 0], slice(0, rows))

    def _take(self, hidden: Tensor, part: slice) -> None:
        """Samples the next token of the rows in ``part`` from their last hidden states."""
        logits = self.target.logits(self.target.rms(hidden, self.target.norm)).float()
        temperature = self.temperature[part]
        likely = logits >= logits.amax(-1, keepdim=True) + self.owner.log_min_p * temperature
        # Gumbel-max: the argmax of logits / T plus Gumbel noise is a draw from softmax(logits / T).
        noise = -torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        scores = (logits + temperature * noise).masked_fill_(~likely, float("-inf"))
        chosen = scores.argmax(-1)
        self.token[part] = chosen
        self.done[part] |= (chosen[:, None] == self.owner.end_ids).any(-1)

    def _mark_loops(self, step: int) -> None:
        """Ends rows whose last LOOP_WINDOW tokens repeat with a period of at most LONGEST_PERIOD tokens."""
        if step < LOOP_WINDOW:
            return
        window = self.output[self.slot[: self.rows], step - LOOP_WINDOW : step]
        for period in range(1, LONGEST_PERIOD + 1):
            self.done[: self.rows] |= (window[:, period:] == window[:, :-period]).all(-1)

    def _compact(self, active: int) -> None:
        """Halves the batch when at most half of its rows are still running."""
        half = self.rows // 2
        if active > half or half < 16:
            return
        keep = torch.argsort(self.done[: self.rows].to(torch.int8), stable=True)[:half]
        for keys, values in self.cache:
            keys[:half] = keys[keep]
            values[:half] = values[keep]
        for tensor in (self.position, self.temperature, self.token, self.done, self.slot):
            tensor[:half] = tensor[keep]
        self.rows = half


def _decode_attention(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention of one query a row: q [B, heads, 1, d], keys and values [B, kv heads, K, d], bias [B, 1, 1, K].

    The heads of a group become rows of one product, so that keys are read once and never expanded.
    """
    batch, heads, _, size = q.shape
    grouped = q.reshape(batch, keys.shape[1], heads // keys.shape[1], size)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)) * size**-0.5 + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).reshape(batch, heads, 1, size)


def _bucket(length: int, size: int) -> int:
    return (length + size - 1) // size * size
