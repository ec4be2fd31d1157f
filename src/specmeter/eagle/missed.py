"""Where a chain of drafts failed, and which place the draft gave to the token that the target has there.

A chain shows the target one draft a position. What a tree of several branches would have caught follows from the place,
in the draft's own order, of the token that the target chose instead (Chen et al., Sequoia, arXiv 2402.12374, section 3:
acceptance by rank). Nothing is computed unless the place is asked for, which probes do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specmeter.eagle.draft import Draft

OUTSIDE = 0
"""The place of a token that the draft's vocabulary does not have."""


@dataclass(frozen=True)
class Missed:
    """The ``head``'s ``logits`` [1, draft_vocab] where its chain failed, and the target's own ``token`` there."""

    logits: Tensor
    head: Draft
    token: int

    @property
    def rank(self) -> list[int]:
        """The place of the token among the draft's, from 2 on (1 is the draft that failed), or OUTSIDE.

        Empty on a device, which would have to be waited for.
        """
        if self.logits.device.type != "cpu":
            return []
        places = self.head.places
        at = int(places[self.token]) if self.token < len(places) else -1
        if at < 0:
            return [OUTSIDE]
        # numpy: a probe reads this after each cycle, and torch takes several times as long for so little.
        row = self.logits.float().numpy()[0]
        # Of two equal ones the first was drafted, so that the other is second.
        return [max(2, 1 + int(np.count_nonzero(row > row[at])))]
