"""A deep window of a process behind --on: taken there, its files sent over, read here as they are read there."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.address import parse
from specmeter.hosts.place import There
from specmeter.hosts.relay import Relay
from specmeter.trace.deep import load_deep
from tests.support.children import until
from tests.support.deep_server import ON_CPU, deep_server, run_line

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)


def test_window_comes_over_and_reads_the_same(tmp_path: Path) -> None:
    with deep_server(tmp_path, ON_CPU) as (link, child):
        place = There(Relay(parse("env"), sys.executable))
        try:
            found = place.find_link(str(link.path))
            with pytest.raises(SpecmeterError, match="not armed"):
                place.deep(found, 5, "", 60.0)
            assert not place.arm(found, 10.0, 30.0)
            until(lambda: list(link.path.glob("*.ring")), "its ring is there")
            asked = place.deep(found, 5, "k=2", 60.0)
            place.disarm(found, 10.0)
            place.collect(found)
            assert asked.activity == "cpu" and len(asked.done) == 1 and found.path != link.path
            [there], [here] = load_deep(link.path), load_deep(found.path)
            assert here.setting == "k=2" and here.cycle_count == 5 and here.cycles == there.cycles
            for name in here.kernels:
                assert np.array_equal(here.kernels[name], there.kernels[name]), name
            assert all(file.stat().st_mode & 0o077 == 0 for file in (found.path / "deep").iterdir())
            mirror = place.mirrors[link.id]
            for damaged in (b"no zlib", zlib.compress(b"x" * 1000)[:-3]):
                with pytest.raises(ValueError, match="It"):
                    mirror.keep_deep(1, 1, 1, "trace", damaged)
            run_line(child, "going = False")
            place.arm(found, 10.0, 30.0)
            with pytest.raises(SpecmeterError, match="runs decode cycles") as caught:
                place.deep(found, 5, "", 0.2)
            assert caught.value.exit == Exit.SERVER_FAILED
        finally:
            place.close()
