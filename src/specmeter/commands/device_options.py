"""How the device is timed: the options that the commands which make a link have in common."""

from __future__ import annotations

import argparse


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """``--device-events`` and ``--stamps``."""
    parser.add_argument(
        "--device-events",
        action="store_true",
        help="time device points outside captured graphs, by events (docs/device-time.md)",
    )
    parser.add_argument(
        "--stamps",
        action="store_true",
        help="and inside captured graphs, by one-thread kernels that are captured with them at the server's start",
    )


def device_of(args: argparse.Namespace) -> str | None:
    """What was asked for: None, ``"events"``, or ``"stamps"`` (both)."""
    if getattr(args, "stamps", False):
        return "stamps"
    return "events" if getattr(args, "device_events", False) else None
