"""What a phase or a cycle is bound by: its time on the device in four parts, and a word for the largest of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.device_idle import LATENCY, QUEUED, UNSEEN, WAITING, WORK, Blame, by_cause
from specmeter.analysis.device_join import Joined
from specmeter.analysis.intervals import Ints
from specmeter.analysis.kernel_classes import COLLECTIVES

# A phase is bound by what takes more than this share of its time on the device; where nothing does, it is mixed.
BOUND_SHARE = 0.5
WORDS = {
    "host": "host-bound",
    "waiting": "waiting",
    "communication": "communication-bound",
    "device": "device-bound",
}


@dataclass(frozen=True)
class Bound:
    """The verdict and its numbers, shares of 1 of the time on the device: its kernels and the gaps that they end.

    ``host``: idle because the host worked or had only just launched; ``waiting``: idle while the host waited (for
    input, for the device's last results); ``communication``: collectives; ``device``: all other kernels, and gaps in
    front of work that was queued already. ``word`` is that of a share above BOUND_SHARE, else ``mixed``; ``nothing``
    where no time is there. What is left to 1 is gaps whose launch was not seen.
    """

    word: str
    host: float
    waiting: float
    communication: float
    device: float
    ms: float


def bounds_of(joined: Joined, at: Ints, blame: Blame, group: Ints, gap_group: Ints, count: int) -> list[Bound]:
    """The verdicts of groups 0..count-1 of kernels ``at`` (``group``, an entry a kernel) and of the parts of gaps."""
    added, kind = joined.added[at], joined.kind[at]
    talk = np.bincount(group, weights=np.where(kind == COLLECTIVES, added, 0), minlength=count)
    work = np.bincount(group, weights=np.where(kind == COLLECTIVES, 0, added), minlength=count)
    idle = by_cause(blame, gap_group, count)
    parts = np.stack([idle[:, WORK] + idle[:, LATENCY], idle[:, WAITING], talk, work + idle[:, QUEUED]], axis=1)
    return [_bound(row, float(rest)) for row, rest in zip(parts, idle[:, UNSEEN], strict=True)]


def _bound(parts: NDArray[np.float64], rest: float) -> Bound:
    total = float(parts.sum()) + rest
    if total <= 0:
        return Bound("nothing", 0.0, 0.0, 0.0, 0.0, 0.0)
    shares = dict(zip(WORDS, (float(part) / total for part in parts), strict=True))
    most = max(shares, key=lambda name: shares[name])
    word = WORDS[most] if shares[most] > BOUND_SHARE else "mixed"
    return Bound(word, shares["host"], shares["waiting"], shares["communication"], shares["device"], total / 1e6)
