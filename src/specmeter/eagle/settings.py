"""What a request may set: speculation (SGLang's names and meaning) and sampling."""

from __future__ import annotations

from dataclasses import dataclass

from specmeter.errors import SpecmeterError

MAX_STEPS = 16
MAX_TOPK = 16
MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class SpecSettings:
    """How far to speculate, with the meaning that SGLang gives these names.

    ``speculative_num_steps`` is the depth of the draft; 0 means plain decoding. ``speculative_eagle_topk`` is the
    number of branches a step; 1 is a chain. ``speculative_num_draft_tokens`` is the number of tokens that the target
    verifies at once and counts the root, the last token already produced; left out it is steps + 1 for a chain and
    the whole tree, at most 64, otherwise. ``speculative_draft_p_min`` ends a draft early: a further step is drafted
    only while the draft's own probability of its likeliest path so far is at least this; 0 always drafts every step.
    Raises SpecmeterError if a value is out of range.
    """

    speculative_num_steps: int
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int | None = None
    speculative_draft_p_min: float = 0.0

    def __post_init__(self) -> None:
        p_min = self.speculative_draft_p_min
        if isinstance(p_min, bool) or not isinstance(p_min, int | float) or not 0.0 <= p_min < 1.0:
            raise _error("speculative_draft_p_min", p_min, "it must be at least 0 and below 1")
        _check("speculative_num_steps", self.speculative_num_steps, 0, MAX_STEPS)
        _check("speculative_eagle_topk", self.speculative_eagle_topk, 1, MAX_TOPK)
        if self.speculative_num_steps == 0:
            if self.speculative_num_draft_tokens not in (None, 0, 1):
                raise _error("speculative_num_draft_tokens", self.speculative_num_draft_tokens, "no draft at 0 steps")
            return
        if self.speculative_num_draft_tokens is not None:
            _check("speculative_num_draft_tokens", self.speculative_num_draft_tokens, 2, self.largest_tree)

    @property
    def largest_tree(self) -> int:
        """The most tokens these steps and branches can draft, root included, at most 64."""
        topk, steps = self.speculative_eagle_topk, self.speculative_num_steps
        return min(1 + topk + (steps - 1) * topk * topk, MAX_DRAFT_TOKENS)

    @property
    def draft_tokens(self) -> int:
        """Tokens the target verifies in a cycle, root included."""
        return self.speculative_num_draft_tokens or self.largest_tree


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when a request ends.

    ``temperature`` 0 is greedy. ``top_p`` keeps the smallest set of tokens whose probabilities sum to it. ``seed``
    makes the draws repeatable. ``max_tokens`` bounds the new tokens; ``stop_ids`` end the request (the stop token is
    the last one given out) unless ``ignore_eos`` is set. Raises SpecmeterError if a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise _error("temperature", self.temperature, "it must be from 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise _error("top_p", self.top_p, "it must be above 0 and at most 1")
        if self.max_tokens < 1:
            raise _error("max_tokens", self.max_tokens, "it must be at least 1")

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0.0


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _error(name, value, f"it must be a whole number from {low} to {high}")


def _error(name: str, value: object, why: str) -> SpecmeterError:
    return SpecmeterError(f"{name} = {value!r} cannot be used.", f"{why[0].upper()}{why[1:]}.", "Change the setting.")
