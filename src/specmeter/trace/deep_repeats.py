"""Single draft steps inside one captured graph: the same block of kernels, as often as there are steps in its loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Another kernel may be chosen for a few places of a step (another split of the context), so blocks need not be equal.
ALIKE = 0.9
MOST = 8192
# (places covered, equal places, start, length of a block) and how many blocks.
Run = tuple[tuple[int, int, int, int], int]


def split_repeats(names: NDArray[Any], count: int | None = None) -> list[slice]:
    """Find the block that repeats in a sequence of kernel names, with a part before and one after that do not.

    ``names``: one entry a kernel, in order, anything that compares equal for equal kernels. ``count``: how many
    repetitions there must be; None takes those that cover most, the shorter block where several cover the same. Each
    block has at least ALIKE of its places equal to the next one's, all of them where ``count`` contradicts that. Gives
    the blocks in order, neighbours of one length; none where nothing repeats (so often), or for more than MOST kernels.
    """
    total = len(names)
    if total < 2 or total > MOST or (count is not None and count < 2):
        return []
    _, codes = np.unique(np.asarray(names), return_inverse=True)
    best = _best(codes, None)
    if count is not None and best is not None and best[1] != count:
        # Blocks that are merely alike can be found for a wrong number too.
        best = _best(codes, count, 1.0)
    if best is None:
        return []
    (_covered, _equal, start, length), found = best
    return [slice(start + at * length, start + (at + 1) * length) for at in range(found)]


def _best(codes: NDArray[np.int64], count: int | None, alike: float = ALIKE) -> Run | None:
    """The run that covers most, and of those the one with the most equal places."""
    best: Run | None = None
    for length in range(1, len(codes) // (count or 2) + 1):
        if best is not None and length * (len(codes) // length) <= best[0][0]:
            continue
        candidate = _of_length(codes, length, count, alike)
        if candidate is not None and (best is None or candidate[0][:2] > best[0][:2]):
            best = candidate
    return best


def _of_length(codes: NDArray[np.int64], length: int, count: int | None, least: float) -> Run | None:
    """The best run of blocks of one length: (covered, equal places, start, length) and how many blocks."""
    equal = codes[:-length] == codes[length:]
    if int(np.count_nonzero(equal)) < length * least:
        return None
    sums = np.concatenate([[0], np.cumsum(equal)])
    matches = sums[length:] - sums[:-length]  # of the block at each place with the next one
    alike = matches >= length * least
    if not bool(alike.any()):
        return None
    blocks, score = np.ones(len(alike), np.int64), np.zeros(len(alike), np.int64)
    # From the end: a block goes on with what the next one has.
    for begin in range(len(alike) - 1 - (len(alike) - 1) % length, -1, -length):
        here = slice(begin, min(begin + length, len(alike)))
        after = np.arange(here.start, here.stop) + length
        known = after < len(alike)
        more, points = np.ones(len(after), np.int64), np.zeros(len(after), np.int64)
        more[known], points[known] = blocks[after[known]], score[after[known]]
        blocks[here] = np.where(alike[here], more + 1, 1)
        score[here] = np.where(alike[here], points + matches[here], 0)
    usable = blocks >= 2 if count is None else blocks == count
    if not bool(usable.any()) or (count is not None and int(blocks.max()) > count):
        return None
    covered = np.where(usable, blocks * length, 0)
    at = np.flatnonzero(covered == covered.max())
    start = int(at[np.argmax(score[at])])
    return (int(covered[start]), int(score[start]), start, length), int(blocks[start])
