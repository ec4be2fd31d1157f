"""What holds for every test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings

    # What is drawn is the same at every run, and slowness is no failure: a red run means that something has changed.
    # `pytest --hypothesis-profile=explore` looks for new examples.
    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")
except ImportError:  # the tests on a GPU go without
    pass

# A suite started in the background of a script, or under nohup, inherits ignored signals and hands them on: whoever is
# interrupted by a test would not notice. A handler of ours becomes the default one in every process that is started.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="module", autouse=True)
def _ends_what_a_failed_test_left() -> Iterator[None]:
    """A server that a failed test of one file left running is no load on the tests of the next."""
    from specmeter.engines.guardian import descendants

    before = set(descendants(os.getpid()))
    yield
    for pid in set(descendants(os.getpid())) - before:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if words and b"multiprocessing" not in words:  # whose resource tracker is for the whole suite
                print(f"left running and ended: {pid} {words[:200]!r}", file=sys.stderr)
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # it has just ended by itself
