"""A request as the load generator saw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One request and its times.

    ``send_ns``, ``first_ns`` (first text) and ``end_ns`` (last token, with text or without) are perf_counter_ns of the
    machine the server runs on, or of the client's where no trace is joined. ``setting`` names the engine setting,
    ``baseline`` meaning no speculation; ``block`` is the block of an interleaved schedule and ``start`` the server
    start, both counted from 0.
    ``error`` is empty for a request that finished.
    """

    request_id: str
    prompt_id: str
    setting: str
    block: int
    send_ns: int
    first_ns: int
    end_ns: int
    prompt_tokens: int
    output_tokens: int
    error: str = ""
    start: int = 0

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first token, prefill not included; None when that cannot be said."""
        if self.error or self.output_tokens < 2 or self.end_ns <= self.first_ns:
            return None
        return (self.output_tokens - 1) / (self.end_ns - self.first_ns) * 1e9


def finished(requests: Sequence[Request], setting: str | None = None) -> list[Request]:
    """The requests that ended well, of one setting or of all."""
    return [r for r in requests if not r.error and (setting is None or r.setting == setting)]
