"""Text from outside (model names, paths, prompts) made harmless for a terminal."""

from __future__ import annotations

import unicodedata


def inert(text: object, limit: int = 80) -> str:
    """``text`` with control and format characters replaced by ``?`` and cut to ``limit`` characters."""
    plain = "".join(
        "?" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else c for c in str(text)
    )
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"
