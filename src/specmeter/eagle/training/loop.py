"""The training loop: AdamW on fp32 master weights, a cosine schedule over wall-clock time, checkpoints that resume.

Nothing in a step waits for the device; the losses of a stretch of steps are read together when it is logged.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specmeter.eagle.training.data import Batch, Corpus, batches, make_batch
from specmeter.eagle.training.evaluate import chain_acceptance
from specmeter.eagle.training.head import Head, save_head
from specmeter.eagle.training.loss import target_probabilities, unrolled_loss
from specmeter.eagle.training.target import BatchedTarget


@dataclass(frozen=True)
class TrainSettings:
    """How to train. ``seconds`` is the budget of the loop; times between checkpoints and evaluations are in seconds."""

    seconds: float
    seed: int = 0
    steps: int = 7
    decay: float = 0.8
    batch_tokens: int = 24576
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    warmup_steps: int = 200
    clip: float = 1.0
    ema: float = 0.998
    temperature: float = 1.0
    most_steps: int | None = None
    log_every: int = 50
    checkpoint_every_s: float = 75.0
    evaluate_every_s: float = 60.0
    evaluate_batches: int = 6


class Trainer:
    """Trains ``head`` on ``corpus``; keeps logs and checkpoints in ``folder``.

    The head's averaged weights (EMA) are what is evaluated and saved. ``note`` goes into the saved config.
    """

    def __init__(
        self,
        head: Head,
        target: BatchedTarget,
        corpus: Corpus,
        settings: TrainSettings,
        folder: Path,
        note: dict[str, Any],
        say: Callable[[str], None] = print,
    ) -> None:
        self.head, self.target, self.corpus = head, target, corpus
        self.settings, self.folder, self.note, self.say = settings, folder, note, say
        self.average = [p.detach().clone() for p in head.weights]
        self.optimizer = _optimizer(head, settings, say)
        self.step = 0
        self.spent_s = 0.0
        self.stopping = False
        self.rate_scale = 1.0
        self.log: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(self) -> None:
        """Trains until the budget, the most steps, or SIGTERM/SIGINT (a second one is not held); saves the head.

        Raises KeyboardInterrupt after a signal, once the head is saved.
        """
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._loop()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.save()
        if self.stopping:
            raise KeyboardInterrupt

    def evaluate(self, groups: Sequence[Sequence[int]] | None = None, steps: int = 6) -> dict[str, Any]:
        """Chain acceptance of the averaged weights on held-out greedy sequences (a fixed few unless ``groups``)."""
        chosen = groups if groups is not None else self._held_out()
        live = [p.detach().clone() for p in self.head.weights]
        _copy(self.head.weights, self.average)
        summary = chain_acceptance(self.head, self.target, self.corpus, chosen, steps).summary()
        _copy(self.head.weights, live)
        return summary

    def save(self) -> None:
        """Saves the averaged head (``folder/head``) and the state to resume from (``folder/state.pt``), atomically."""
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.average):
            self.say("weights are not finite: the last saved head stays")
            return
        named = dict(zip(self.head.names, self.average, strict=True))
        note = {**self.note, "optimizer_steps": self.step, "train_seconds": round(self.spent_s, 1)}
        save_head(self.folder / "head", self.head.shape, named, self.head.draft_ids, note)
        partial = self.folder / ".state.partial"
        state = {
            "step": self.step,
            "spent_s": self.spent_s,
            "weights": [p.detach() for p in self.head.weights],
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, partial)
        partial.replace(self.folder / "state.pt")

    def _loop(self) -> None:
        settings = self.settings
        started = last_save = last_check = time.monotonic()
        resumed_s = self.spent_s
        losses: list[Tensor] = []
        tokens = 0
        for members in self._endless():
            self.spent_s = resumed_s + time.monotonic() - started
            finished = settings.most_steps is not None and self.step >= settings.most_steps
            if self.stopping or finished or self.spent_s >= settings.seconds:
                break
            batch = make_batch(self.corpus, members, settings.steps, self.target.device)
            if any(len(rows) == 0 for rows in batch.rows):
                continue
            losses.append(self._update(batch))
            tokens += batch.answer_tokens
            if self.step % settings.log_every == 0:
                self._log_losses(losses, tokens, time.monotonic() - started)
                losses = []
            now = time.monotonic()
            if now - last_check > settings.evaluate_every_s:
                self._log({"kind": "held_out", **self.evaluate()})
                last_check = time.monotonic()
            if now - last_save > settings.checkpoint_every_s:
                self.save()
                last_save = time.monotonic()
        self.spent_s = resumed_s + time.monotonic() - started

    def _update(self, batch: Batch) -> Tensor:
        settings, head = self.settings, self.head
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        states, final = self.target.states(batch.ids, head.shape.capture)
        wanted = target_probabilities(self.target, final, batch.positions, head.draft_ids, settings.temperature)
        loss, each = unrolled_loss(
            head, head.cast(), self.target, batch, states, wanted, settings.steps, settings.decay
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.weights, settings.clip)
        self.optimizer.step()
        self.step += 1
        # A short memory at first, so that the average forgets the start.
        ema = min(settings.ema, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in head.weights], 1 - ema)
        return each

    def _rate(self) -> float:
        settings = self.settings
        share = min(1.0, self.spent_s / settings.seconds)
        if settings.most_steps is not None:
            share = max(share, self.step / settings.most_steps)
        warm = min(1.0, (self.step + 1) / settings.warmup_steps)
        return self.rate_scale * settings.learning_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))

    def _endless(self) -> Iterator[list[int]]:
        # A resumed run starts another epoch order than the first: its step count is part of the seed.
        epoch = self.step
        while True:
            yield from batches(self.corpus, self.settings.batch_tokens, self.settings.seed + 7919 * epoch, False)
            epoch += 1

    def _held_out(self) -> list[list[int]]:
        groups = batches(self.corpus, self.settings.batch_tokens, 1, True)
        greedy = ([i for i in group if self.corpus.greedy[i]] for group in groups)
        return [group for group in greedy if group][: self.settings.evaluate_batches]

    def _log_losses(self, losses: list[Tensor], tokens: int, elapsed_s: float) -> None:
        if not losses:
            return
        mean = torch.stack(losses).mean(0).tolist()
        self._log(
            {
                "kind": "train",
                "loss_per_step": [round(value, 4) for value in mean],
                "answer_tokens_per_s": round(tokens / elapsed_s),
                "learning_rate": round(self._rate(), 7),
            }
        )
        if not np.isfinite(mean).all():
            self._recover()

    def _log(self, entry: dict[str, Any]) -> None:
        entry = {**entry, "step": self.step, "seconds": round(self.spent_s, 1)}
        self.log.append(entry)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
        left = max(0.0, self.settings.seconds - self.spent_s)
        if entry["kind"] == "train":
            text = f"loss {entry['loss_per_step'][0]:.3f}..{entry['loss_per_step'][-1]:.3f}"
            self.say(f"step {self.step}: {text}, {entry['answer_tokens_per_s']} tok/s, {left:.0f} s left")
        else:
            lengths = entry["accept_length_per_position"]
            self.say(f"step {self.step}: held out AL {lengths} (k=1..{len(lengths)}), {left:.0f} s left")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.say(f"signal {number}: saving the head and stopping")
        self.stopping = True
        signal.signal(number, signal.SIG_DFL)

    def _recover(self) -> None:
        """Goes back to the last checkpoint at half the learning rate, a few times at most."""
        self.rate_scale /= 2
        if not (self.folder / "state.pt").exists() or self.rate_scale < 0.1:
            raise FloatingPointError(f"the loss is not finite after {self.step} steps")
        self.say(f"the loss is not finite: back to the last checkpoint, learning rate x {self.rate_scale}")
        self._resume()

    def _resume(self) -> None:
        path = self.folder / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        if [tuple(p.shape) for p in state["weights"]] != [tuple(p.shape) for p in self.head.weights]:
            self.say(f"{path} is of another head: training starts anew")
            return
        _copy(self.head.weights, state["weights"])
        _copy(self.average, state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.spent_s = int(state["step"]), float(state["spent_s"])
        self.say(f"resumed at step {self.step}, {self.spent_s:.0f} s in")


def settings_note(settings: TrainSettings) -> dict[str, Any]:
    """The settings as plain values, for the saved config."""
    return asdict(settings)


def _optimizer(head: Head, settings: TrainSettings, say: Callable[[str], None]) -> torch.optim.Optimizer:
    matrices = [p for p in head.weights if p.ndim > 1]
    norms = [p for p in head.weights if p.ndim == 1]
    groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    options = {"lr": settings.learning_rate, "betas": (0.9, 0.95), "weight_decay": settings.weight_decay}
    if matrices[0].device.type == "cuda":
        try:
            return torch.optim.AdamW(groups, fused=True, **options)  # type: ignore[arg-type]
        except RuntimeError as error:
            say(f"fused AdamW is off: {error}")
    return torch.optim.AdamW(groups, **options)  # type: ignore[arg-type]


def _copy(into: Any, source: Any) -> None:
    with torch.no_grad():
        for a, b in zip(into, source, strict=True):
            a.copy_(b)
