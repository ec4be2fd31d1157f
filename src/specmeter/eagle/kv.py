"""The preallocated key-value cache of one sequence, and the attention masks over it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")


class Slots(NamedTuple):
    """One layer's part of the cache in one forward.

    ``fresh`` [2, kv_heads, rows, head_dim] is what the new rows write; ``keys`` and ``values``
    [kv_heads, 1, keys, head_dim] are what they attend to, which ends with their own.
    """

    fresh: Tensor
    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of every layer for one sequence, in slots 0 .. capacity-1.

    ``data`` is [layers, 2, kv_heads, capacity, head_dim]; index 0 of the second dimension holds keys. ``length`` is
    the number of slots in use; slots beyond it are scratch for tokens that are not accepted yet.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        self.capacity = capacity
        self.length = 0
        shape = (layers, 2, kv_heads, capacity, head_dim)
        if device.type != "cpu":
            self.data = torch.zeros(shape, dtype=dtype, device=device)
            return
        # numpy's zeros are the system's own untouched pages: a context that is not used takes no memory.
        pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        self.data = torch.from_numpy(pages).view(dtype).view(shape)

    def window(self, start: int, rows: int) -> list[Slots]:
        """Each layer's slots for ``rows`` new tokens from slot ``start`` on."""
        fresh = self.data.narrow(3, start, rows).unbind(0)
        seen = self.data.narrow(3, 0, start + rows).unsqueeze(3)
        return list(map(Slots, fresh, seen.select(1, 0).unbind(0), seen.select(1, 1).unbind(0)))

    def compact(self, slots: list[int]) -> None:
        """Moves ``slots`` (ascending, all at or beyond ``length``) to ``length`` .. and counts them in.

        Everything else beyond ``length`` is dropped. Slots that already lie where they belong are not copied.
        """
        start = self.length
        for target, slot in enumerate(slots, start):
            if slot != target:
                self._move(slots[target - start :], target)
                break
        self.length = start + len(slots)

    def _move(self, slots: list[int], target: int) -> None:
        kept = self.data.index_select(3, torch.tensor(slots, device=self.data.device))
        self.data.narrow(3, target, len(slots)).copy_(kept)


class TreeMask:
    """Additive attention masks for rows that attend to the whole past and, among themselves, to their ancestors.

    The buffer is [rows, past + tail]; the past's columns are zero for ever and the tail's hold the tree. A view that
    begins ``start`` columns before the tail is the mask for a past of ``start`` tokens, so no mask is built per
    cycle beyond the small tail.
    """

    def __init__(self, rows: int, past: int, tail: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self.past = past
        self.buffer = torch.zeros(rows, past + tail, dtype=dtype, device=device)
        self.tail = self.buffer[:, past:]
        self.tail.fill_(float("-inf"))

    def set_visible(self, visible: Tensor) -> None:
        """Writes the tail from a boolean matrix [rows, columns]: True where the row may attend to the column."""
        rows, columns = visible.shape
        self.tail[:rows, :columns] = torch.where(visible, 0.0, float("-inf"))

    def view(self, start: int, rows: int, columns: int) -> Tensor:
        """The mask [rows, start + columns] for a past of ``start`` tokens and the tail's first ``columns``."""
        return self.buffer[:rows, self.past - start : self.past + columns]
