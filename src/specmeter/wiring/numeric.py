"""Target and head run by the embedded engine's code on text that the target wrote, under any wiring.

Row t of a sequence x joins the target's states at t with token x[t+1] and drafts x[t+2]. All rows of all sequences go
through the head in one forward, with a mask that keeps sequences apart; a further draft step takes the head's own
output and drafted token, and sees the true rows up to t and its own earlier steps (training-time test, EAGLE-3,
arXiv 2503.01840, section 3.2). On greedily written text the drafts that a server would accept are those that equal x.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specmeter.eagle.config import DraftConfig, LlamaConfig, read_config
from specmeter.eagle.draft import Draft
from specmeter.eagle.kv import KVCache, Slots
from specmeter.eagle.layer import Attention, RmsNorm, Step
from specmeter.eagle.layouts import choose_layout
from specmeter.eagle.target import Target
from specmeter.eagle.tokenizer import Tokenizer
from specmeter.errors import SpecmeterError


@dataclass(frozen=True)
class Text:
    """Sequences that the target wrote greedily. ``starts`` is the first row of each that decoding would draft at."""

    sequences: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]


@dataclass
class Bench:
    """A target, a head, and every state of the target at every row of the text.

    ``states`` is [layers + 1, rows, hidden]; ``ids`` [rows], ``positions`` [rows] and ``line`` [rows] (the number of
    the row's sequence) describe the rows; ``judged`` [rows] marks those whose next tokens were written by the target.
    """

    target: Target
    head: Draft
    states: Tensor
    ids: Tensor
    positions: Tensor
    line: Tensor
    judged: Tensor

    @property
    def slots(self) -> int:
        """States that the head's fc takes."""
        return len(self.head.config.capture)

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""
        return self.target.config.num_hidden_layers


class _NormedResidual:
    """A head's attention whose residual is the normed hidden input: ``norm_before_residual`` of a head's config."""

    def __init__(self, attention: Attention, norm: RmsNorm) -> None:
        self._attention = attention
        self._norm = norm

    def forward(self, x: Tensor, residual: Tensor, step: Step, slots: Slots) -> Tensor:
        """As Attention.forward; ``residual`` [rows, hidden] is the head's hidden input."""
        return self._attention.forward(x, self._norm(residual), step, slots)


def with_normed_residual(bench: Bench) -> Bench:
    """The same bench with a head whose attention is added to the normed hidden input, not to the plain one."""
    head = copy.copy(bench.head)
    head.attention = _NormedResidual(head.attention, head.hidden_norm)  # type: ignore[assignment]
    return replace(bench, head=head)


def load(target_dir: Path, draft_dir: Path, slots: int, threads: int | None = None) -> tuple[Target, Draft]:
    """Both models by the embedded engine's loaders; the head's stated layers play no part."""
    if threads is not None:
        torch.set_num_threads(threads)
    layout = choose_layout("auto")
    layers = LlamaConfig.from_dir(target_dir).num_hidden_layers
    everything = tuple(range(layers + 1))
    positions = 1024
    target = Target.from_dir(target_dir, capture=everything, positions=positions, layout=layout)
    config = head_config(draft_dir, slots)
    return target, Draft.from_dir(draft_dir, config, target, positions=positions)


def head_config(draft_dir: Path, slots: int) -> DraftConfig:
    """The head's shape with ``slots`` states; which states they are is decided later."""
    raw = read_config(draft_dir)
    vocab = raw.get("draft_vocab_size") or raw.get("vocab_size")
    layer = LlamaConfig.from_dir(draft_dir)
    if not isinstance(vocab, int):
        raise SpecmeterError(
            f"The head in {draft_dir} states no vocabulary size.",
            "Its config.json has neither draft_vocab_size nor vocab_size as a whole number.",
            "Correct its config.json.",
        )
    return DraftConfig(layer=layer, draft_vocab_size=vocab, capture=tuple(range(slots)))


@torch.inference_mode()
def write_text(target: Target, tokenizer: Tokenizer, prompts: Sequence[str], new_tokens: int) -> Text:
    """Let the target answer all prompts at once, greedily: one cache holds all sequences, a mask keeps them apart."""
    sequences = [tokenizer.encode(_as_chat(tokenizer, prompt)) for prompt in prompts]
    starts = [len(sequence) - 1 for sequence in sequences]
    size = sum(len(sequence) for sequence in sequences)
    cache = target.new_cache(size + len(sequences) * new_tokens)
    line = torch.tensor([number for number, sequence in enumerate(sequences) for _ in sequence])
    positions = torch.tensor([position for sequence in sequences for position in range(len(sequence))])
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    seen_line, seen_positions, used = line, positions, 0
    last = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0) - 1
    open_lines = list(range(len(sequences)))
    for _ in range(new_tokens):
        visible = (seen_line[None, :] == line[:, None]) & (seen_positions[None, :] <= positions[:, None])
        mask = torch.zeros(visible.shape, dtype=target.dtype).masked_fill_(~visible, float("-inf"))
        output, _ = target.forward(tokens, positions, mask, cache, used, capture=False)
        used += len(tokens)
        chosen = target.logits(output[last]).argmax(-1).tolist()
        for number, token in zip(open_lines, chosen, strict=True):
            sequences[number].append(token)
        open_lines = [number for number in open_lines if sequences[number][-1] not in tokenizer.stop_ids]
        if not open_lines:
            break
        line = torch.tensor(open_lines)
        tokens = torch.tensor([sequences[number][-1] for number in open_lines])
        positions = torch.tensor([len(sequences[number]) - 1 for number in open_lines])
        last = torch.arange(len(open_lines))
        seen_line, seen_positions = torch.cat([seen_line, line]), torch.cat([seen_positions, positions])
    kept = [number for number, start in enumerate(starts) if len(sequences[number]) - start > 3]
    if not kept:
        raise SpecmeterError("the target answers every prompt with an end token", next_step="Give another target.")
    return Text(tuple(tuple(sequences[number]) for number in kept), tuple(starts[number] for number in kept))


def _as_chat(tokenizer: Tokenizer, prompt: str) -> str:
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    except SpecmeterError:
        return prompt


@torch.inference_mode()
def prepare(target: Target, head: Draft, text: Text) -> Bench:
    """One forward of the target over each sequence, keeping all states."""
    hidden, layers = target.config.hidden_size, target.config.num_hidden_layers
    parts: list[Tensor] = []
    for sequence in text.sequences:
        rows = len(sequence)
        positions = torch.arange(rows)
        mask = torch.full((rows, rows), float("-inf"), dtype=target.dtype).triu_(1)
        cache = target.new_cache(rows)
        _, captured = target.forward(torch.tensor(sequence), positions, mask, cache, 0, capture=True)
        assert captured is not None
        parts.append(captured.view(rows, layers + 1, hidden).transpose(0, 1))
    lengths = [len(sequence) for sequence in text.sequences]
    judged = [t >= start and t + 2 < n for n, start in zip(lengths, text.starts, strict=True) for t in range(n)]
    return Bench(
        target,
        head,
        torch.cat(parts, dim=1).contiguous(),
        torch.tensor([token for sequence in text.sequences for token in sequence]),
        torch.cat([torch.arange(n) for n in lengths]),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        torch.tensor(judged),
    )


def ahead(bench: Bench, by: int) -> Tensor:
    """Token ids ``by`` rows ahead in the same sequence [rows]; -1 past its end."""
    rows = bench.ids.shape[0]
    index = torch.arange(rows) + by
    inside = index < rows
    index = index.clamp(max=rows - 1)
    same = inside & (bench.line[index] == bench.line)
    return torch.where(same, bench.ids[index], torch.full_like(bench.ids, -1))


class Unroller:
    """Runs draft steps over all rows at once for hidden inputs that the caller makes; buffers are kept between runs."""

    def __init__(self, bench: Bench, steps: int) -> None:
        self.bench = bench
        self.steps = steps
        rows = bench.ids.shape[0]
        dtype = bench.head.dtype
        self._cache: KVCache = bench.head.new_cache(rows * steps)
        earlier = bench.positions[None, :] <= bench.positions[:, None]
        causal = earlier & (bench.line[None, :] == bench.line[:, None])
        blocks = [causal, *([torch.eye(rows, dtype=torch.bool)] * (steps - 1))]
        visible = torch.cat(blocks, dim=1)
        self._mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        self._next = ahead(bench, 1).clamp(min=0)

    @torch.inference_mode()
    def first(self, hidden: Tensor) -> Tensor:
        """The head's output before its final norm at the first draft step, [rows, hidden]."""
        rows = hidden.shape[0]
        return self.bench.head.forward(self._next, hidden, self.bench.positions, self._mask[:, :rows], self._cache, 0)

    @torch.inference_mode()
    def accepted(self, hidden: Tensor, target_ids: Tensor) -> Tensor:
        """Accepted drafts of every row [rows], 0..steps; ``target_ids`` maps draft ids to target ids."""
        bench, rows = self.bench, hidden.shape[0]
        output = self.first(hidden)
        running = torch.ones(rows, dtype=torch.bool)
        count = torch.zeros(rows, dtype=torch.long)
        for step in range(self.steps):
            drafted = target_ids[bench.head.logits(output).argmax(-1)]
            running &= drafted == ahead(bench, 2 + step)
            count += running
            if step + 1 < self.steps:
                mask = self._mask[:, : rows * (step + 2)]
                positions = bench.positions + step + 1
                output = bench.head.forward(drafted, output, positions, mask, self._cache, rows * (step + 1))
        return count
