"""CUDA graphs of the passes, and how a cycle's result reaches the host.

On a device without graphs (tests on the CPU) a prepared pass is the plain function, and a result is there at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Pass = Callable[[], None]

DEPTH = 4
"""Results that may be under way at once."""


class Graphs:
    """Captures passes into graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.enabled = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None
        # The graphs themselves; a replay method alone would keep each alive as well, but not countable.
        self.captured: list[torch.cuda.CUDAGraph] = []

    def prepare(self, function: Pass) -> Pass:
        """What runs ``function`` on the device. It is run once first, so that kernels are compiled and scratch buffers
        made outside the capture: whatever it writes must not matter yet."""
        if not self.enabled:
            return function
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server's, a profiler's) may use CUDA meanwhile; what they do is not part of this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        self.captured.append(graph)
        return graph.replay


class Mail:
    """Results on their way to the host, first in, first out: each copied to pinned memory, with an event behind it."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._slots = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(DEPTH)]
        self._events = [torch.cuda.Event() for _ in range(DEPTH)] if pinned else None  # type: ignore[no-untyped-call]
        self._free = deque(range(DEPTH))
        self._sent: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def post(self, result: Tensor) -> None:
        """Sends a copy of ``result`` [size] as the stream reaches this point; the host goes on at once."""
        slot = self._free.popleft()
        self._slots[slot].copy_(result, non_blocking=True)
        if self._events is not None:
            self._events[slot].record()
        self._sent.append(slot)

    def take(self) -> list[int]:
        """The oldest result; waits for it. The only wait of a cycle."""
        slot = self._sent.popleft()
        if self._events is not None:
            self._events[slot].synchronize()
        self._free.append(slot)
        numbers: list[int] = self._slots[slot].tolist()
        return numbers

    def discard(self) -> None:
        """Forgets what is under way. The device may still write there; it does so before anything posted later."""
        self._free.extend(self._sent)
        self._sent.clear()
