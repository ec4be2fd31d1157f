"""The embedded engine: what it feeds. Its heads state physical states, so there is no convention to derive."""

from __future__ import annotations

from collections.abc import Mapping

from specmeter.wiring.feed import CAPTURE, Feed, lookup
from specmeter.wiring.from_source import as_ids
from specmeter.wiring.shape import Shape

NAME = "specmeter"


def derive(version: str, target: Shape, config: Mapping[str, object]) -> list[Feed]:
    """What ``specmeter serve`` feeds: the states k of H[k] under ``specmeter_capture``, in the order written there."""
    # Nested first, as the engine reads it.
    key = next((key for key in reversed(CAPTURE) if lookup(config, key) is not None), None)
    ids = as_ids(lookup(config, key)) if key is not None else None
    refusal = "" if ids else "the head's config states no specmeter_capture"
    if ids and not all(0 <= k <= (target.layers or 0) for k in ids):
        refusal = f"it wants states outside 0 to {target.layers}"
    return [Feed(NAME, version, "", key, ids, None if refusal else ids, "source", refusal=refusal, reads=CAPTURE)]
