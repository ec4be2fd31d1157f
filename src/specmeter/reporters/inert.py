"""Text from outside (model names, paths, prompts) made harmless for a terminal."""

from __future__ import annotations

import unicodedata


def inert(text: object, limit: int = 80) -> str:
    """``text`` with control and format characters replaced by ``?`` and cut to ``limit`` characters."""
    plain = "".join(
        "?" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else c for c in str(text)
    )
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def inert_lines(text: object, limit: int = 4000, most: int = 400) -> str:
    """Text of several lines, each made inert and cut to ``limit`` characters; tabs become spaces.

    Of more than ``most`` lines the last are left out.
    """
    lines = str(text).replace("\r\n", "\n").replace("\t", "    ").split("\n")
    kept = [inert(line, limit) for line in lines[:most]]
    return "\n".join([*kept, f"… {len(lines) - most} more lines"] if len(lines) > most else kept)
