"""What a rank's sums are, and what they say of some seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.plan import PHASES

MOST_POSITIONS = 16
_FIELDS = (
    "cycles",
    "cycle_ns",
    "leaf_ns",
    "tokens",
    "sequences",
    "sequence_tokens",
    "batch",
    "plain",
    "plain_ns",
    "seam_cycles",
    "seam_ns",
    "clean",
    "clean_ns",
    "hidden",
    "seen",
    "seen_tokens",
)
# Where each sum stands in a row; after them the phases, then sequences that drafted and that kept each position.
AT = {name: i for i, name in enumerate(_FIELDS)}
PHASE0 = len(_FIELDS)
DRAFTED0 = PHASE0 + len(PHASES)
KEPT0 = DRAFTED0 + MOST_POSITIONS
WIDTH = KEPT0 + MOST_POSITIONS


@dataclass(frozen=True)
class Recent:
    """Sums over some seconds.

    ``cycle_ms`` and the phases are means over speculative cycles, ms; ``rest_ms`` is what no leaf point covers. With
    the probes in some cycles only, ``clean`` of the ``cycles`` ran without them: the phases are the others',
    and the tokens of clean cycles whose counts were not read are taken to be as many as in the others.
    ``tokens_per_s`` counts all tokens, plain steps included, over as much of these seconds as was watched. ``kept`` is,
    for each draft position, the share of the sequences that drafted so far; ``plain_ms`` is a step without speculation,
    over the last minute; ``seam_ms`` the mean over speculative cycles whose device time was recorded. None: not known.
    """

    seconds: int
    cycles: int
    tokens_per_s: float
    cycle_ms: float | None
    phases_ms: dict[str, float]
    rest_ms: float
    accept_length: float | None
    kept: tuple[float, ...]
    batch: float | None
    plain_ms: float | None
    seam_ms: float | None
    clean: int = 0

    @property
    def split_ms(self) -> float:
        """The mean cycle that the phases are parts of, ms."""
        return sum(self.phases_ms.values()) + max(self.rest_ms, 0.0)


def tokens_each(sums: NDArray[np.float64]) -> float:
    """Tokens a cycle where they were read; a cycle without its probes is taken to give as many."""
    seen = float(sums[AT["seen"]])
    return float(sums[AT["seen_tokens"]]) / seen if seen else 0.0


def recent_of(sums: NDArray[np.float64], plain: NDArray[np.float64], seconds: int, watched_s: float) -> Recent:
    """What a row of sums over ``seconds`` says; ``plain`` is (ns, steps) without speculation."""
    value = {name: float(sums[i]) for name, i in AT.items()}
    cycles = value["cycles"]
    each = 1e6 * cycles
    drafted, kept = sums[DRAFTED0:KEPT0], sums[KEPT0:]
    every = cycles + value["clean"]
    tokens = value["tokens"] + value["hidden"] * tokens_each(sums)
    return Recent(
        seconds, int(every), tokens / (watched_s if watched_s > 0 else seconds),
        (value["cycle_ns"] + value["clean_ns"]) / every / 1e6 if every else None,
        {p: float(sums[PHASE0 + i]) / each for i, p in enumerate(PHASES) if cycles and sums[PHASE0 + i]},
        (value["cycle_ns"] - value["leaf_ns"]) / each if cycles else 0.0,
        value["sequence_tokens"] / value["sequences"] if value["sequences"] else None,
        tuple(float(k / d) for k, d in zip(kept, drafted, strict=True) if d),
        value["batch"] / cycles if cycles and value["batch"] else None,
        float(plain[0] / plain[1]) / 1e6 if plain[1] else None,
        value["seam_ns"] / value["seam_cycles"] / 1e6 if value["seam_cycles"] else None, int(value["clean"]),
    )  # fmt: skip
