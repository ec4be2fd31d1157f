"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text; returns what may be given out now. ``matched`` is set once a stop string was seen."""
        if not self._stops or self.matched:
            return "" if self.matched else text
        self._held += text
        places = [place for place in map(self._held.find, self._stops) if place >= 0]
        if places:
            self.matched = True
            out, self._held = self._held[: min(places)], ""
            return out
        keep = self._possible_start()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        out, self._held = self._held, ""
        return out

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
