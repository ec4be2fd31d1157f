"""What a run's settings are called: the server's own setting after its steps, where its cycles tell them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.rundir import Run

# What a run calls the setting of requests that asked for none.
SERVER = ("server", "")


def common_steps(steps: NDArray[np.integer]) -> int | None:
    """The draft steps that all of these cycles took, or None where they differ or are not known."""
    one = len(steps) > 0 and int(steps.min()) == int(steps.max()) and int(steps.min()) > 0
    return int(steps[0]) if one else None


def shown_setting(run: Run, name: str) -> str:
    """``name``, or ``k=3`` for the server's own setting where all of its cycles drafted a chain of 3 steps."""
    cycles = run.cycles if name in SERVER else None
    if not cycles or not len(cycles["t0_ns"]):
        return name or SERVER[0]
    mine = (cycles["setting"] == name) & (cycles["kind"] == "decode") & (cycles["dropped"] == "")
    steps, batch = cycles["steps"][mine], np.maximum(cycles["batch"][mine], 1)
    one = common_steps(steps) is not None
    # A tree's steps do not tell its branches.
    drafted = cycles["drafted"][mine]
    chain = one and bool(np.all((drafted >= 0) & (drafted <= steps * batch)))
    return f"k={int(steps[0])}" if chain else name or SERVER[0]
