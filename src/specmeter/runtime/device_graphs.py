"""Graphs of torch as they are captured and replayed: a key for each capture, stamps at both ends, replays counted.

``torch.cuda.CUDAGraph``'s ``capture_begin``, ``capture_end`` and ``replay`` are wrapped while device stamps are wanted;
``remove`` puts the originals back. The first node of a graph is then a stamp, so that what the device waited before it
is no part of any span, and so is its last. Each capture has a key of its own: a graph that is captured again, another
batch size or step count is another graph.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

KEY = "_specmeter_graph"
_WRAPPED = ("capture_begin", "capture_end", "replay")


class Graph:
    """One captured graph. ``replays`` counts its launches; ``followed`` has (cycle, point) of those wanted."""

    __slots__ = ("astray", "followed", "key", "ordinals", "replays", "stamps")

    def __init__(self, key: int) -> None:
        self.key = key
        self.replays = 0
        self.followed: Dict[int, Tuple[int, int]] = {}
        self.ordinals: Dict[int, int] = {}
        self.stamps = 0
        self.astray = False

    def next_ordinal(self, point: int) -> int:
        """Which call of ``point`` in this graph comes now, from 0."""
        ordinal = self.ordinals.get(point, 0)
        self.ordinals[point] = ordinal + 1
        return ordinal


class GraphHooks:
    """Wraps torch's graph class. ``begun(graph)`` and ``ending(graph)`` are called inside a capture, ``before()``
    before one begins, ``launched()`` gives (cycle, point) for a replay to follow, else None. What one of them raises
    goes to ``failed(error)``, and torch's own call goes on.
    """

    def __init__(
        self,
        before: Callable[[], bool],
        begun: Callable[[Graph], None],
        ending: Callable[[Graph], None],
        launched: Callable[[], Optional[Tuple[int, int]]],
        failed: Callable[[BaseException], None],
        most: int,
    ) -> None:
        self.graphs: Dict[int, Graph] = {}
        self.current: Optional[Graph] = None
        self.left_out = 0
        self._before, self._begun, self._ending, self._launched = before, begun, ending, launched
        self._failed = failed
        self._most = most
        self._class: Any = None
        self._originals: List[Tuple[str, Any]] = []

    @property
    def installed(self) -> bool:
        """Whether torch's class is wrapped."""
        return self._class is not None

    def install(self, graph_class: Any) -> None:
        """Wrap the class's methods, once."""
        if self._class is not None:
            return
        for name in _WRAPPED:
            own = vars(graph_class).get(name)
            original = getattr(graph_class, name)
            self._originals.append((name, own))
            setattr(graph_class, name, getattr(self, "_make_" + name)(original))
        self._class = graph_class

    def remove(self) -> None:
        """Put back what was there; graphs keep their stamps, whose rows nobody reads any more."""
        graph_class, self._class = self._class, None
        for name, own in self._originals:
            if own is None:
                delattr(graph_class, name)
            else:
                setattr(graph_class, name, own)
        self._originals.clear()

    def _make_capture_begin(self, original: Any) -> Any:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            ready = self._safe(self._before)
            result = original(graph, *args, **kwargs)
            self.current = None
            if ready:
                self._safe(self._begin, graph)
            return result

        return capture_begin

    def _make_capture_end(self, original: Any) -> Any:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            entry, self.current = self.current, None
            if entry is not None:
                self._safe(self._ending, entry)
            return original(graph, *args, **kwargs)

        return capture_end

    def _make_replay(self, original: Any) -> Any:
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            entry = getattr(graph, KEY, None)
            if entry is None:
                return original(graph, *args, **kwargs)
            number = entry.replays = entry.replays + 1
            self._safe(self._count, entry)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                entry.replays -= 1
                entry.followed.pop(number, None)
                raise

        return replay

    def _safe(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            self._failed(error)
            return None

    def _begin(self, graph: Any) -> None:
        self.current = entry = self._new(graph)
        if entry is not None:
            self._begun(entry)

    def _count(self, entry: Graph) -> None:
        follow = self._launched()
        if follow is not None:
            entry.followed[entry.replays] = follow
        if self.current is not None:
            entry.astray = True  # now a part of another graph, whose replays count it too

    def _new(self, graph: Any) -> Optional[Graph]:
        key = len(self.graphs) + 1
        try:
            setattr(graph, KEY, None)
            if key >= self._most:
                self.left_out += 1
                return None
            entry = self.graphs[key] = Graph(key)
            setattr(graph, KEY, entry)
        except AttributeError:
            self.left_out += 1  # a graph class that takes no attribute
            return None
        return entry
