"""The links of other hosts for ``top``: mirrored as they come and go, their moments on this machine's clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specmeter.control.link import Link
from specmeter.errors import SpecmeterError
from specmeter.hosts.mirror import FarLink, Shift
from specmeter.hosts.place import There


class FarLinks:
    """As ``live.watch.LinksHere``, for one or several hosts; ``chosen`` is the one link to show, None for all."""

    def __init__(self, places: Sequence[There], chosen: str | None = None) -> None:
        self._places = places
        self._chosen = chosen
        self._shifts = []
        for place in places:
            clock = place.relay.clock()
            self._shifts.append(Shift(-clock.offset_ns, time.time_ns() - time.perf_counter_ns()))

    def list(self) -> list[Link]:
        """The links that are there now. Raises SpecmeterError when a connection is lost."""
        found: list[Link] = []
        for place, shift in zip(self._places, self._shifts, strict=True):
            place.relay.check_fault()
            described = {str(entry["link"]): entry for entry in place.relay.call("links")[0]["links"]}
            if self._chosen is not None:
                described = {id: entry for id, entry in described.items() if id == self._chosen}
            for gone in place.mirrors.keys() - described.keys():
                place.mirrors.pop(gone).close()
            for id, entry in described.items():
                if id not in place.mirrors:
                    name = id if len(self._places) == 1 else f"{id} on {place.relay.host.name}"
                    place.mirror(entry, shift, name=name)
                    place.relay.call("watch", link=id)
                found.append(place.mirrors[id].link)
        if self._chosen is not None and not found:
            names = ", ".join(place.relay.host.name for place in self._places)
            raise SpecmeterError(f"There is no link {self._chosen} there, on {names}.")
        return found

    def arm(self, link: Link, timeout_s: float) -> tuple[int, int]:
        """Arm there, to stay; gives how many processes did and how many did not answer."""
        return self._tell("arm", link, timeout_s)

    def disarm(self, link: Link, timeout_s: float) -> tuple[int, int]:
        """Disarm there."""
        return self._tell("disarm", link, timeout_s)

    def lost(self, link: Link) -> int:
        """Records that were overwritten there before they came over."""
        return link.lost if isinstance(link, FarLink) else 0

    def _tell(self, op: str, link: Link, timeout_s: float) -> tuple[int, int]:
        assert isinstance(link, FarLink)
        place = next(p for p in self._places if any(m.link is link for m in p.mirrors.values()))
        answer, _ = place.relay.call(op, link=link.far_id, timeout_s=timeout_s, watchdog_s=None)
        return int(answer["done"]), len(answer["silent"])
