"""The options of a load under a sampling budget."""

from __future__ import annotations

import argparse
import secrets

from specmeter.bench.budget import Budget
from specmeter.control.sampling import checked_budget


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """``--budget`` and ``--nvtx`` of commands that drive a load."""
    parser.add_argument(
        "--budget", type=float, metavar="PERCENT",
        help="what probes may cost, in percent of the cycle: only some cycles have them (default: all have)",
    )  # fmt: skip
    parser.add_argument("--nvtx", action="store_true", help="spans also push NVTX ranges")


def budget_of(args: argparse.Namespace) -> Budget:
    """What the arguments ask for; the draw is seeded anew each time. Raises SpecmeterError."""
    percent = getattr(args, "budget", None)
    return Budget(
        None if percent is None else checked_budget(percent),
        secrets.randbelow(1 << 31),
        True if getattr(args, "nvtx", False) else None,
    )
