"""Reads one module's replacement code from the link, if it was made for the very file that this process imported."""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from typing import Any, Dict

FORMAT = 4


class CannotLoad(Exception):
    """Why a module gets no probes, as a sentence for the report."""


def load_code(link: str, name: str, origin: str, plan: Dict[str, Any]) -> Dict[str, Any]:
    """The content of ``link``'s code/NAME.bin, for the module ``name`` imported from the file ``origin``.

    Raises CannotLoad where it was made for another file, Python or -O level, OSError where a file cannot be read.
    """
    if not origin.endswith(".py"):
        raise CannotLoad(f"it was not imported from source but from {origin or 'nowhere'}")
    with open(os.path.join(link, "code", f"{name}.bin"), "rb") as file:
        raw = file.read()
    magic = plan.get("python", {}).get("magic")
    own = _magic()
    if magic is not None and magic != own:
        raise CannotLoad(f"the code was made by another Python (magic {magic}, here {own})")
    content: Dict[str, Any] = marshal.loads(raw)
    with open(origin, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if content["format"] != FORMAT or digest != content["sha256"]:
        raise CannotLoad(f"{origin} is not the file that was planned (its sha256 is {digest})")
    if content["optimize"] != sys.flags.optimize:
        raise CannotLoad(f"Python runs with -O level {sys.flags.optimize}, the plan was made without it")
    return content


def _magic() -> str:
    from importlib.util import MAGIC_NUMBER

    return MAGIC_NUMBER.hex()
