"""Checks of vocabularies: sizes, the maps between draft and target ids, lm_head, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator

from specmeter.checkpoint.folder import Checkpoint
from specmeter.checkpoint.safetensors_header import read_integers
from specmeter.wiring.findings import Finding, error, note, warning
from specmeter.wiring.head import EAGLE3, Head
from specmeter.wiring.shape import Shape


def check_vocabulary(head: Head, target: Shape) -> list[Finding]:
    """Every finding about vocabularies. Reads the values of d2t and t2d, nothing else of the weights."""
    found = [*_sizes(head, target)]
    if head.kind == EAGLE3 and head.tensors:
        found += [*_lm_head(head), *_maps(head, target)]
    return found


def _sizes(head: Head, target: Shape) -> Iterator[Finding]:
    vocab, draft = head.shape.vocab, head.shape.draft_vocab
    if vocab and target.vocab and vocab != target.vocab:
        yield error(
            "vocab-size",
            f"the head's vocab_size is {vocab}, the target's {target.vocab}",
            "The head shares the target's embeddings and must know its ids.",
            f"Set vocab_size to {target.vocab} if the head is the target's; otherwise use another head.",
        )
    if draft and (vocab or target.vocab) and draft > (vocab or target.vocab or 0):
        yield error("draft-vocab", f"draft_vocab_size {draft} is larger than the vocabulary {vocab or target.vocab}")
    own = head.tensors.get("embed_tokens.weight")
    if own is not None and target.vocab and own.shape[:1] != (target.vocab,):
        yield error(
            "vocab-size",
            f"the head's embed_tokens has {own.shape[0] if own.shape else 0} rows, the target {target.vocab} tokens",
        )


def _lm_head(head: Head) -> Iterator[Finding]:
    lm_head = head.tensors.get("lm_head.weight")
    draft, vocab = head.shape.draft_vocab, head.shape.vocab
    if head.shape.tied:
        if draft and vocab and draft != vocab:
            yield error(
                "lm-head-tied",
                f"tie_word_embeddings is set, with a draft vocabulary of {draft} and embeddings of {vocab} rows",
                "SGLang takes the embeddings for lm_head then: its logits have the wrong vocabulary.",
                "Set tie_word_embeddings to false.",
            )
        elif lm_head is not None:
            yield warning(
                "lm-head-tied",
                "tie_word_embeddings is set although the head has its own lm_head",
                "SGLang uses the embeddings and leaves the trained lm_head unused.",
                "Set tie_word_embeddings to false.",
            )
        return
    if lm_head is None:
        if draft is None:
            yield note("lm-head", "the head has no lm_head and no draft_vocab_size: it shares the target's lm_head")
        else:
            yield error(
                "lm-head",
                f"the head has no lm_head.weight although draft_vocab_size is {draft}",
                "Its logits would come from weights that were never loaded.",
                "Export the head with its lm_head, or remove draft_vocab_size to share the target's.",
            )
    elif lm_head.shape[:1] != (draft or vocab,) or lm_head.shape[1:] != (head.shape.hidden,):
        yield error(
            "draft-vocab",
            f"lm_head.weight is {list(lm_head.shape)}; the config asks for {[draft or vocab, head.shape.hidden]}",
            cure="Set draft_vocab_size to the rows of lm_head.",
        )


def _maps(head: Head, target: Shape) -> Iterator[Finding]:
    d2t, t2d = head.tensors.get("d2t"), head.tensors.get("t2d")
    vocab = target.vocab or head.shape.vocab
    draft = head.shape.draft_vocab
    if d2t is None:
        if draft and vocab and draft < vocab:
            yield error(
                "d2t-missing",
                f"the draft vocabulary has {draft} of {vocab} tokens, but there is no d2t map",
                "Draft ids would be taken for target ids: nearly every draft is wrong.",
                "Export the head with d2t.",
            )
        return
    offsets = read_integers(d2t)
    if draft and len(offsets) != draft:
        yield error("d2t-length", f"d2t has {len(offsets)} entries, draft_vocab_size is {draft}")
    if vocab:
        yield from _map_values(offsets, vocab, None if t2d is None else read_integers(t2d))


def _map_values(offsets: list[int], vocab: int, mask: list[int] | None) -> Iterator[Finding]:
    targets = [index + offset for index, offset in enumerate(offsets)]
    fault = _absolute(offsets, targets, vocab, mask)
    if fault is not None:
        yield fault
        return
    outside = [token for token in targets if not 0 <= token < vocab]
    if outside:
        yield error(
            "d2t-range",
            f"d2t maps {len(outside)} draft tokens outside the target's {vocab} tokens, the first to {outside[0]}",
            "The map belongs to another tokenizer, or holds something else than offsets.",
            "Export the map again: d2t[i] = target id - i.",
        )
    doubled = len(targets) - len(set(targets))
    if doubled:
        yield error("d2t-duplicate", f"d2t maps {doubled} draft tokens to a target token that another one has already")
    if mask is None:
        return
    if len(mask) != vocab:
        yield error("t2d-length", f"t2d has {len(mask)} entries, the target {vocab} tokens")
        return
    if sum(1 for bit in mask if bit) != len(offsets) or any(not mask[t] for t in targets if 0 <= t < vocab):
        yield error(
            "t2d-mismatch",
            "t2d does not mark exactly the tokens that d2t maps to",
            "Both came from different selections of the draft vocabulary; engines use d2t, training used t2d.",
            "Export both from one selection.",
        )


def _absolute(offsets: list[int], targets: list[int], vocab: int, mask: list[int] | None) -> Finding | None:
    """d2t holding target ids instead of offsets: they grow strictly, and t2d (if any) marks exactly them."""
    growing = all(a < b for a, b in zip(offsets, offsets[1:]))  # noqa: B905, RUF007 (3.9)
    inside = bool(offsets) and offsets[0] >= 0 and offsets[-1] < vocab
    if len(offsets) < 2 or not growing or not inside:
        return None
    if mask is not None and (len(mask) != vocab or any(not mask[token] for token in offsets)):
        return None
    if mask is None and targets[-1] < vocab:
        return None
    return error(
        "d2t-absolute",
        "d2t holds target ids, not offsets",
        "Engines add the draft id to it: every mapped token is wrong, nothing is accepted.",
        "Store d2t[i] = target id - i.",
    )


def check_text(head: Checkpoint, target: Checkpoint) -> list[Finding]:
    """Tokenizer, chat template and special tokens of the head's folder against the target's, where it has them."""
    found: list[Finding] = []
    own, other = head.digest("tokenizer.json"), target.digest("tokenizer.json")
    if own and other and own != other:
        found.append(
            warning(
                "tokenizer",
                "the head's tokenizer.json differs from the target's",
                "Engines use the target's; a head trained with another tokenizer predicts other tokens.",
                "Check that the head was trained for this target; copy the target's tokenizer over.",
            )
        )
    mine, theirs = head.chat_template(), target.chat_template()
    if mine and theirs and mine != theirs:
        found.append(
            warning(
                "chat-template",
                "the head's chat template differs from the target's",
                "The head was trained on text of another form, which lowers acceptance.",
                "Serve with the template that the head was trained with.",
            )
        )
    for key in ("bos_token_id", "eos_token_id"):
        pair = head.config.get(key), target.config.get(key)
        if None not in pair and _as_set(pair[0]).isdisjoint(_as_set(pair[1])):
            found.append(warning("special-tokens", f"{key} is {pair[0]} in the head and {pair[1]} in the target"))
    return found


def _as_set(value: object) -> set[str]:
    return {str(item) for item in value} if isinstance(value, list) else {str(value)}
