"""The block that repeats in a graph's kernels: found exactly where there is one, with a few places changed, or none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.trace.deep_repeats import split_repeats

# Kernels of the parts are never those of the block, and a block holds one kernel that comes once: no smaller period.
BLOCK = st.lists(st.integers(0, 6), min_size=0, max_size=20).map(lambda block: [100, *block])
PART = st.lists(st.integers(50, 60), max_size=15, unique=True)


@given(PART, BLOCK, st.integers(2, 9), PART, st.booleans())
@settings(max_examples=200, deadline=None)
def test_blocks_are_found_exactly(
    before: list[int], block: list[int], count: int, after: list[int], told: bool
) -> None:
    after = [number + 100 for number in after]
    sequence = np.array([*before, *block * count, *after])
    found = split_repeats(sequence, count if told else None)
    start = len(before)
    assert found == [slice(start + i * len(block), start + (i + 1) * len(block)) for i in range(count)]


@given(PART, st.integers(10, 40), st.integers(2, 8), PART, st.data())
@settings(max_examples=100, deadline=None)
def test_blocks_with_a_changed_kernel_are_found(
    before: list[int], length: int, count: int, after: list[int], data: st.DataObject
) -> None:
    block = np.arange(length)
    blocks = np.tile(block, (count, 1))
    # Not at an edge of a block: where it then begins cannot be told.
    at = data.draw(st.integers(0, count - 1)), data.draw(st.integers(1, length - 2))
    blocks[at] = 999
    sequence = np.concatenate([np.array(before, int), blocks.ravel(), np.array(after, int) + 500])
    found = split_repeats(sequence, count)
    assert [slice_.start for slice_ in found] == [len(before) + i * length for i in range(count)]


@given(st.lists(st.integers(0, 5), max_size=60), st.one_of(st.none(), st.integers(2, 6)))
@settings(max_examples=200, deadline=None)
def test_whatever_is_found_is_neighbours_of_one_length_that_are_alike(names: list[int], count: int | None) -> None:
    sequence = np.array(names, int)
    found = split_repeats(sequence, count)
    assert found == [] or len(found) == (count or len(found)) >= 2
    for one, next_ in itertools.pairwise(found):
        assert one.stop == next_.start and next_.stop <= len(names)
        equal = sequence[one] == sequence[next_]
        assert len(equal) == one.stop - one.start and equal.mean() >= 0.9


def test_names_may_be_text_and_nothing_repeats_in_nothing() -> None:
    found = split_repeats(np.array(["fill", "gemm", "relu", "gemm", "relu", "argmax"]))
    assert found == [slice(1, 3), slice(3, 5)]
    assert split_repeats(np.array([], dtype=object)) == split_repeats(np.array(["a"])) == []
    assert split_repeats(np.arange(50)) == split_repeats(np.arange(50), 3) == []


@pytest.mark.parametrize("layers", [2, 8])
def test_layers_inside_a_step_do_not_hide_the_steps(layers: int) -> None:
    step = ["embed", *["norm", "qkv", "attention", "out", "gate", "down"] * layers, "head", "topk"]
    found = split_repeats(np.array(["fill", *step * 4, "tree"]))
    assert len(found) == 4 and all(piece.stop - piece.start == len(step) for piece in found)
    for wrong in (3, 5):
        assert split_repeats(np.array(["fill", *step * 4, "tree"]), wrong) == []
    # Steps that skip a kernel in the last one still give those before.
    assert len(split_repeats(np.array(["fill", *step * 3, *step[:-1], "tree"]), 3)) == 3
