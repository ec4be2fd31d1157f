"""``--deep`` that is cut short: the probes go out at once, which ends the window, and nobody waits for cycles."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specmeter.bench.schedule import Sending
from specmeter.bench.session import Session
from specmeter.commands.deep_option import take_windows
from specmeter.control.deep import DeepAsked


def test_an_interrupt_takes_the_probes_out_without_waiting_for_the_window() -> None:
    out, asked = threading.Event(), threading.Event()

    @contextmanager
    def armed() -> Iterator[None]:
        try:
            yield
        finally:
            out.set()

    def deep(*_arguments: Any) -> DeepAsked:
        asked.set()
        assert out.wait(60), "the probes did not go out"  # as a window ends that sees no more cycles
        return DeepAsked(1, "cpu", (), {1: "the probes were taken out"}, {}, ())

    def drive(*_arguments: Any) -> None:
        assert asked.wait(60)
        raise KeyboardInterrupt

    running = SimpleNamespace(link=object(), armed=armed, place=SimpleNamespace(deep=deep), drive=drive, engine=None)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        take_windows(cast(Session, running), [None], [], Sending(8), 5, cast(Any, None))
    assert out.is_set() and time.monotonic() - began < 40
