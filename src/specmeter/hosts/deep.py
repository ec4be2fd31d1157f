"""A deep window of a far host's processes: asked for there, its files sent over into the link's mirror."""

from __future__ import annotations

from specmeter.control.deep import DeepAsked
from specmeter.hosts.mirror import Mirror
from specmeter.hosts.relay import Relay
from specmeter.hosts.shapes import sent


def far_window(relay: Relay, mirror: Mirror, cycles: int, label: str, deadline_s: float) -> DeepAsked:
    """As ``control.deep.deep_window``. Raises SpecmeterError, with exit 4 for files that no specmeter would send."""
    link = mirror.link.far_id
    found, _ = relay.call("deep", link=link, cycles=cycles, label=label, deadline_s=deadline_s)
    number, done = int(found["number"]), tuple(found["done"])
    for pid in done:
        for part in ("trace", "meta"):
            answer, packed = relay.call("deep_file", link=link, number=number, pid=pid, part=part)
            try:
                mirror.keep_deep(pid, answer["start"], number, part, packed)
            except ValueError as error:
                raise relay.named(sent(f"a damaged deep window of process {pid}", f"{error}.")) from None
    failed, left_out = ({int(pid): str(why) for pid, why in found[key].items()} for key in ("failed", "left_out"))
    return DeepAsked(number, str(found["activity"]), done, failed, left_out, tuple(found["notes"]))
