"""A runner that records a forward once a batch size and replays it, as CUDA graphs are used."""

from __future__ import annotations

from collections.abc import Callable


def work(n: int) -> int:
    """Something that takes time."""
    return sum(i * i for i in range(n)) % 7


class GraphRunner:
    """Captures ``forward`` for each batch size at start; ``replay`` runs what was captured."""

    def __init__(self, forward: Callable[[list[int]], list[int]], sizes: tuple[int, ...] = (1, 2)) -> None:
        self.graphs = {size: (lambda rows: forward(rows)) for size in sizes}

    def can_run(self, rows: list[int]) -> bool:
        """Whether there is a graph for that many rows."""
        return len(rows) in self.graphs

    def replay(self, rows: list[int]) -> list[int]:
        """Run the graph of that size."""
        return self.graphs[len(rows)](rows)


class ModelRunner:
    """A model with its graphs: ``forward`` replays one where it can."""

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.graph_runner = GraphRunner(self.forward_raw)

    def forward_raw(self, rows: list[int]) -> list[int]:
        """The eager forward."""
        return [row + 1 + work(self.cost) * 0 for row in rows]

    def forward(self, rows: list[int]) -> list[int]:
        """Graph or eager."""
        if self.graph_runner.can_run(rows):
            return self.graph_runner.replay(rows)
        return self.forward_raw(rows)
