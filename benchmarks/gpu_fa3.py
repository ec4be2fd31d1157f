"""Whether a folder of packages holds SGLang's FlashAttention kernels, without which ``--attention-backend fa3`` fails.

They are an extension of a few hundred MB in sgl_kernel, which a small bundle may leave out; SGLang imports
``sgl_kernel.flash_attn`` for it (layers/attention/flashattention_backend.py of 0.5.16).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("--attention-backend", "fa3")
NAMES = ("fa3-plain", "fa3")


def lacking(site: Path) -> str:
    """Why these starts cannot be, or an empty text."""
    found = sorted(site.glob("sgl_kernel/flash_ops*"))
    return "" if found else f"{site}/sgl_kernel has no flash_ops*: the bundle leaves FlashAttention out"


def left_out(site: Path, out: Path, wanted: Sequence[str], rehearse: bool = False) -> tuple[str, ...]:
    """Names of ``wanted`` that cannot be measured; told, and kept as fa3.left_out.json in ``out``."""
    reason = "" if rehearse else lacking(site)
    names = tuple(name for name in wanted if name in NAMES) if reason else ()
    if names:
        print(f"{', '.join(names)}: left out, {reason}", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "fa3.left_out.json").write_text(json.dumps({"names": names, "reason": reason}))
    return names
