"""The second way in: the engines' plugin entry points (vllm.general_plugins, sglang.srt.plugins)."""

from __future__ import annotations

import os
import sys


def activate() -> None:
    """Start the runtime unless sitecustomize has already; does nothing without SPECMETER_LINK. Never raises."""
    if not os.environ.get("SPECMETER_LINK"):
        return
    try:
        boot = sys.modules.get("_specmeter_runtime.boot")
        if boot is None:
            # Under sitecustomize's name, so that the two ways share one runtime whichever comes first.
            from . import boot as own

            sys.modules["_specmeter_runtime"] = sys.modules[__package__]
            sys.modules["_specmeter_runtime.boot"] = boot = own
        boot.activate()
    except Exception as error:
        print(f"specmeter: the runtime did not start: {type(error).__name__}: {error}", file=sys.stderr)
