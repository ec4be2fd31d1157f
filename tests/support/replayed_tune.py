"""A tune's runner that plays from known speeds: start effects and block noise by seed, no server."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from specmeter.tune.space import Candidate
from specmeter.tune.trial import Observation, Stop


class KnownRunner:
    """``speed`` gives a candidate's true tokens a second, None for one that cannot start."""

    def __init__(
        self,
        speed: Callable[[Candidate], float | None],
        together: bool,
        seed: int = 0,
        start_sd: float = 0.0,
        block_sd: float = 0.0,
    ) -> None:
        self.speed, self.together = speed, together
        self.left_s = math.inf
        self.starts: list[list[Candidate]] = []
        self.start_sd, self.block_sd = start_sd, block_sd
        self._rng = random.Random(seed)

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        """One start: an effect for all of it, noise for each block."""
        self.starts.append(list(candidates))
        if any(self.speed(c) is None for c in candidates):
            return [Observation(c, level, start, (), 1.0, cause="out of GPU memory") for c in candidates]
        effect = self._rng.gauss(0, self.start_sd)
        logs: dict[str, list[float]] = {c.key: [] for c in candidates}
        dropped: set[str] = set()
        for _ in range(blocks - 1):
            for c in candidates:
                if c.key not in dropped:
                    noise = self._rng.gauss(0, self.block_sd)
                    logs[c.key].append(math.log(self.speed(c) or 1.0) + effect + noise)
            dropped |= stop({key: values for key, values in logs.items() if key not in dropped})
        return [
            Observation(c, level, start, tuple(logs[c.key]), 10.0 / len(candidates), stopped=c.key in dropped)
            for c in candidates
        ]
