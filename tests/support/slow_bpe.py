"""Byte level BPE written for plainness, from the papers and the vocabulary alone: a second opinion on a tokenizer.

Pre-tokenizing: digits apart one by one, then GPT-2's pattern, written out by hand as a scanner. Merging: the pair with
the lowest rank anywhere in the word, again and again (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


class SlowBpe:
    """``encode`` of a vocabulary, its merges in rank order, and its control tokens."""

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], control: Sequence[str]) -> None:
        self.vocab = vocab
        self.rank = {pair: place for place, pair in enumerate(merges)}
        self.control = re.compile("(" + "|".join(map(re.escape, control)) + ")")
        self.letters = _byte_letters()

    def encode(self, text: str) -> list[int]:
        """Token ids; bytes that the vocabulary lacks give none."""
        ids: list[int] = []
        for place, part in enumerate(self.control.split(text)):
            if place % 2:
                ids.append(self.vocab[part])
                continue
            for word in (w for run in _split_digits(part) for w in _split_words(run)):
                ids += [self.vocab[piece] for piece in self._merge(word)]
        return ids

    def _merge(self, word: str) -> list[str]:
        letters = [self.letters[byte] for byte in word.encode()]
        pieces = [letter for letter in letters if letter in self.vocab]
        while True:
            ranks = [(self.rank.get(pair, len(self.rank)), i) for i, pair in enumerate(pairwise(pieces))]
            if not ranks or min(ranks)[0] == len(self.rank):
                return pieces
            i = min(ranks)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 for itself, the others from U+0100 on."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, next_free = [], 0x100
    for byte in range(256):
        letters.append(chr(byte if byte in own else next_free))
        next_free += byte not in own
    return letters


def _kind(char: str) -> str:
    if char.isspace() and char not in "\x1c\x1d\x1e\x1f":
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "other")


def _split_digits(text: str) -> Iterator[str]:
    """Runs without numbers, and each number character alone."""
    run = ""
    for char in text:
        if _kind(char) != "number":
            run += char
            continue
        if run:
            yield run
        yield char
        run = ""
    if run:
        yield run


def _split_words(run: str) -> Iterator[str]:
    """GPT-2's pattern: contractions, a run of one kind after at most one space, white space but its last."""
    at = 0
    while at < len(run):
        end = _word_end(run, at)
        yield run[at:end]
        at = end


def _word_end(run: str, at: int) -> int:
    for contraction in CONTRACTIONS:
        if run.startswith(contraction, at):
            return at + len(contraction)
    first = at + 1 if run[at] == " " and at + 1 < len(run) and _kind(run[at + 1]) != "space" else at
    kind = _kind(run[first])
    end = first
    while end < len(run) and _kind(run[end]) == kind:
        end += 1
    if kind == "space" and end < len(run) and end - at > 1:
        return end - 1
    return end
