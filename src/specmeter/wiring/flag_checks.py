"""Checks of the speculative settings of a server against the head and against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specmeter.wiring.findings import Finding, error, note, warning
from specmeter.wiring.head import EAGLE, EAGLE3, Head


@dataclass(frozen=True)
class Settings:
    """Speculative settings as they are given to an engine; None where not given.

    ``draft_tokens`` is SGLang's number of verified tokens, the root included; ``steps`` is vLLM's
    num_speculative_tokens.
    """

    algorithm: str | None = None
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    draft_tp: int | None = None
    tp: int | None = None


def check_settings(head: Head, settings: Settings, engines: tuple[str, ...]) -> list[Finding]:
    """Findings about flags. ``engines`` are the engines in question: "sglang", "vllm" or both."""
    return [*_algorithm(head, settings), *_tree(settings, engines), *_draft_tp(head, settings, engines)]


def _algorithm(head: Head, settings: Settings) -> Iterator[Finding]:
    name = (settings.algorithm or "").upper()
    if not name:
        return
    if name not in ("EAGLE", "EAGLE3", "NEXTN", "MTP"):
        yield note("algorithm", f"the algorithm {settings.algorithm} is not one whose wiring is checked")
    elif head.kind == EAGLE3 and name != "EAGLE3":
        yield error(
            "algorithm",
            f"the head is an EAGLE-3 head, the server is told {settings.algorithm}",
            "The head is then fed one last hidden state instead of its auxiliary states: nothing is accepted (accept "
            "length 1.00), with no error.",
            "SGLang: --speculative-algorithm EAGLE3; vLLM: method eagle3.",
        )
    elif head.kind == EAGLE and name == "EAGLE3":
        yield error(
            "algorithm",
            "the head is an EAGLE head (one state), the server is told EAGLE3",
            "It would be fed several auxiliary states, which its fc cannot take.",
            "SGLang: --speculative-algorithm EAGLE; vLLM: method eagle.",
        )


def _tree(settings: Settings, engines: tuple[str, ...]) -> Iterator[Finding]:
    for name, value in (("steps", settings.steps), ("topk", settings.topk), ("draft tokens", settings.draft_tokens)):
        if value is not None and value < 1:
            yield error("tree-settings", f"{name} must be 1 or more, not {value}")
            return
    steps, topk, tokens = settings.steps, settings.topk, settings.draft_tokens
    if "vllm" in engines and (topk or 1) > 1:
        yield error(
            "tree-settings",
            "vLLM drafts chains only (its token tree is gone since 0.21): a top-k above 1 does nothing",
            cure="Leave top-k at 1 and choose num_speculative_tokens.",
            engine="vllm",
        )
    if "sglang" not in engines or steps is None or tokens is None:
        return
    if topk in (None, 1) and tokens != steps + 1:
        yield error(
            "tree-settings",
            f"with top-k 1 a cycle verifies {steps} drafts and the root, {steps + 1} tokens, not {tokens}",
            "Draft tokens count the root: fewer throw drafted tokens away, more cannot exist. Newer SGLang sets "
            f"{steps + 1} itself, older ones run as told.",
            f"--speculative-num-draft-tokens {steps + 1}",
            engine="sglang",
        )
    elif topk is not None and topk > 1:
        most = 1 + topk + (steps - 1) * topk * topk
        if tokens > most:
            yield error(
                "tree-settings",
                f"{steps} steps with top-k {topk} make at most {most} tokens, not {tokens}",
                cure=f"--speculative-num-draft-tokens {most} or less",
                engine="sglang",
            )
        elif tokens <= steps:
            yield warning(
                "tree-settings",
                f"{tokens} draft tokens cannot hold one path of {steps} steps and its root",
                "The last steps are drafted and never verified.",
                f"--speculative-num-draft-tokens {steps + 1} or more",
                engine="sglang",
            )


def _draft_tp(head: Head, settings: Settings, engines: tuple[str, ...]) -> Iterator[Finding]:
    wanted = settings.draft_tp
    if wanted is not None and "vllm" in engines and head.kind in (EAGLE, EAGLE3) and wanted != settings.tp:
        yield warning(
            "draft-tp",
            f"draft_tensor_parallel_size={wanted} has no effect on an EAGLE head in vLLM",
            "vLLM reads it for plain draft models only; an EAGLE head is built with the target's layout.",
            "Do not count on it: the draft runs at the target's tensor parallel size.",
            engine="vllm",
        )
    if wanted is not None and "sglang" in engines and wanted != settings.tp:
        yield warning(
            "draft-tp",
            "SGLang has no flag for the draft's tensor parallel size",
            "The draft shares the target's group, except under data-parallel attention.",
            "Leave it out; measure the draft's share of collectives instead.",
            engine="sglang",
        )
    size = settings.tp or wanted
    draft = head.shape.draft_vocab
    if size and draft and draft % size:
        yield error(
            "draft-tp",
            f"the draft vocabulary of {draft} cannot be divided over {size} ranks",
            "lm_head is split over the ranks by vocabulary.",
            "Use a tensor parallel size that divides the draft vocabulary.",
        )
