"""From rows of the device ring to spans: begins and ends joined, each replay given the cycle it was launched in."""

from __future__ import annotations

from typing import Callable, Dict, List, Tuple

from .device_graphs import Graph
from .device_stamps import END, FIRST, Row

MOST_OPEN = 4096
POINT = 0xFFFF
# point, cycle, begin and end on the device's clock, ns
Give = Callable[[int, int, int, int], None]
# the same with the graph's key before them: from a graph's first node to its last
GiveGraph = Callable[[int, int, int, int, int], None]


class Joiner:
    """Takes rows in the ring's order. ``graphs`` are those of the hooks, ``calls`` the calls outside graphs by number.

    ``lost`` counts ends whose begin was lapped, ``unknown`` rows of graphs that somebody else launched.
    """

    def __init__(
        self, graphs: Dict[int, Graph], calls: Dict[int, Tuple[int, int]], give: Give, give_graph: GiveGraph
    ) -> None:
        self.lost = 0
        self.unknown = 0
        self._graphs, self._calls = graphs, calls
        self._give, self._give_graph = give, give_graph
        self._open: Dict[Tuple[int, int, int], Tuple[int, int]] = {}

    def forget(self) -> None:
        """Begin anew: no span that is open is to end."""
        self._open.clear()
        self._calls.clear()

    def take(self, rows: List[Row]) -> None:
        """Give the spans that end in ``rows``."""
        for row in rows:
            if row.key == 0:
                self._take_call(row)
            else:
                self._take_graph(row)
        if len(self._open) > MOST_OPEN:
            self._open.clear()  # their ends were lapped

    def _take_call(self, row: Row) -> None:
        if not row.what & END:
            self._open[0, 0, row.number] = (row.number, row.time_ns)
            return
        begin = self._open.pop((0, 0, row.number), None)
        call = self._calls.pop(row.number, None)
        if begin is None or call is None:
            self.lost += call is not None
            return
        self._give(*call, begin[1], row.time_ns)

    def _take_graph(self, row: Row) -> None:
        graph = self._graphs.get(row.key)
        if graph is None or graph.astray:
            return
        if row.number > graph.replays:
            # More replays ran than torch was asked for, so the numbers no longer say which is which.
            graph.astray = True
            graph.followed.clear()
            self.unknown += 1
            return
        follow = graph.followed.get(row.number)
        if follow is None:
            return
        point = row.what & POINT
        place = (row.key, point, row.ordinal)
        if not row.what & END:
            if row.what & FIRST and len(graph.followed) > 1:
                _forget_before(graph, row.number)
            self._open[place] = (row.number, row.time_ns)
            return
        number, begin_ns = self._open.pop(place, (0, 0))
        if number != row.number:
            self.lost += 1
        elif point:
            self._give(point, follow[0], begin_ns, row.time_ns)
        else:
            self._give_graph(row.key, follow[1], follow[0], begin_ns, row.time_ns)
        if not point:
            graph.followed.pop(row.number, None)


def _forget_before(graph: Graph, number: int) -> None:
    """Replays of one graph run in order: what is older has come, or its rows were lapped."""
    for old in [known for known in graph.followed if known < number]:
        del graph.followed[old]
