"""Greedy decoding on a device: the cycle of five steps and the plain step, as prepared passes.

Each step only puts work on the stream; nothing here waits. ``kv`` is where the caches are made to agree: a chain needs
no move, since what was rejected lies beyond the length that ``accept`` set on the device and is overwritten. So what is
left is to send the outcome on its way.
"""

from __future__ import annotations

from specmeter.eagle.cuda_graphs import Graphs, Mail, Pass
from specmeter.eagle.cuda_passes import Passes


class Chain:
    """EAGLE-3 with a chain of ``steps`` drafts, one graph for each of draft, verify, accept and extend.

    They are apart so that each can be timed from outside. Together they would save the gaps between them
    (benchmarks/eagle_cuda.py measures both).
    """

    def __init__(self, passes: Passes, graphs: Graphs, mail: Mail, steps: int, splits: int = 1) -> None:
        self._mail = mail
        self._result = passes.book.result
        self._draft_graph = graphs.prepare(lambda: passes.draft(steps, splits)) if steps > 1 else _nothing
        self._verify_graph = graphs.prepare(lambda: passes.verify(steps, splits))
        self._accept_graph = graphs.prepare(lambda: passes.accept(steps))
        self._extend_graph = graphs.prepare(lambda: passes.extend(steps, splits))

    def cycle(self) -> None:
        """Puts one whole cycle on the stream."""
        self.draft()
        self.verify()
        self.accept()
        self.extend()
        self.kv()

    def draft(self) -> None:
        """Draft steps 2 to the last; step 1 came from the last extend."""
        self._draft_graph()

    def verify(self) -> None:
        """The target over the last token and the drafts."""
        self._verify_graph()

    def accept(self) -> None:
        """Drafts that the target agrees with, counted on the device."""
        self._accept_graph()

    def extend(self) -> None:
        """The draft over what was verified, and step 1 of the next cycle's draft."""
        self._extend_graph()

    def kv(self) -> None:
        """Sends the outcome to the host."""
        self._mail.post(self._result)


class PlainStep:
    """Plain decoding: one graph a token."""

    def __init__(self, passes: Passes, graphs: Graphs, mail: Mail, splits: int = 1) -> None:
        self._mail = mail
        self._result = passes.book.result
        self._step_graph: Pass = graphs.prepare(lambda: passes.plain(splits))

    def cycle(self) -> None:
        """Puts one step on the stream."""
        self.verify()
        self.kv()

    def verify(self) -> None:
        """The target over one token, and the next token."""
        self._step_graph()

    def kv(self) -> None:
        """Sends the outcome to the host."""
        self._mail.post(self._result)


def _nothing() -> None:
    return None
