"""Rings to cycles and phases, as numpy columns; run directories."""

from __future__ import annotations

from specmeter.trace.build import RankTrace, Trace, load_link, load_rings
from specmeter.trace.requests import Request

__all__ = ["RankTrace", "Request", "Trace", "load_link", "load_rings"]
