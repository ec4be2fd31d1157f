"""What the load generator of another host sends back: outcomes, checked and read here; and when it is to send."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace

from specmeter.bench.client import Api, Call, Outcome, Received, read_received
from specmeter.bench.load import OnDone
from specmeter.hosts.far_rings import unpacked
from specmeter.hosts.frames import Message
from specmeter.hosts.shapes import sent
from specmeter.trace.masking import mask_text

_MOST_ANSWER = 1 << 28  # bytes of one answer's events: SGLang's /generate repeats the whole text in each


class Driven:
    """The outcomes of one load as they come."""

    def __init__(self, calls: Sequence[Call], api: Api, on_done: OnDone) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._calls, self._api, self._on_done = calls, api, on_done

    def take(self, message: Message, payload: bytes) -> None:
        """One ``outcome`` event. Raises SpecmeterError for one that no load generator could have made."""
        index = message["index"]
        if not 0 <= index < len(self._calls) or index in self.outcomes:
            raise sent(f"an outcome of request {index} of {len(self._calls)}, or that one twice")
        try:
            events = _events(payload)
        except (ValueError, RecursionError) as error:
            raise sent(f"a damaged outcome of request {index}", f"{error}.") from None
        began, ended = message["send_ns"], message["end_ns"]
        came = message["arrivals_ns"] or [ended] * len(events)
        moments = [began, *came, ended]
        if len(came) != len(events) or moments != sorted(moments):
            raise sent(f"an outcome of request {index} whose moments are out of order")
        pairs = tuple(zip(came, events, strict=True))
        received = Received(began, ended, message["status"], message["problem"], pairs)
        call = self._calls[index]
        outcome = read_received(call, received, self._api)
        # A server may repeat the key that it refuses.
        keys = [value.partition(" ")[2] for value in call.headers.values()]
        outcome = replace(outcome, error=mask_text(outcome.error, [key for key in keys if key]))
        self.outcomes[index] = outcome
        self._on_done(outcome)


def _events(payload: bytes) -> list[bytes]:
    """The events of an outcome, as ``far_load`` packs them. Raises ValueError."""
    head, _, data = unpacked(payload, _MOST_ANSWER).partition(b"\n")
    lengths = json.loads(head)
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError("It has no lengths")
    if sum(lengths) != len(data):
        raise ValueError("Its lengths are not those of its data")
    ends = list(itertools.accumulate(lengths))
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each of the requests is due, in seconds from the first: the same draws as a load from here."""
    rng = random.Random(seed)
    due, moments = 0.0, []
    for _ in range(count):
        moments.append(due)
        due += rng.expovariate(rate)
    return moments
