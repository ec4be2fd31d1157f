"""specmeter: where each millisecond of speculative decoding goes, and which settings win."""

from __future__ import annotations

__version__ = "0.1.0"
