"""A fault at any function of the device clocks: the server's calls, captures and replays go on as they were."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from specmeter.runtime import (
    device,
    device_backend,
    device_events,
    device_graphs,
    device_pairs,
    device_ptx,
    device_spans,
    device_stamp_cost,
    device_stamping,
    device_stamps,
)
from tests.support.sim_device import Sim, SimStream
from tests.support.taken import Taken

MODULES = (
    device, device_backend, device_events, device_graphs, device_pairs, device_ptx, device_spans, device_stamp_cost,
    device_stamping, device_stamps,
)  # fmt: skip
# Called by the runtime outside the server's calls (there a fault is noted), or the last resort itself.
LEFT_OUT = {
    "DeviceClock.pair", "DeviceClock.follow_graphs", "DeviceClock.describe", "StampClock.describe", "DeviceClock.leave",
    "StampClock.describe_cost", "StampCost.describe",
    "DeviceClock.forked", "DeviceClock.set_taking", "DeviceClock._failed", "DeviceClock._stop", "DeviceClock.drain",
    "StampClock.follow", "StampClock.stop", "StampClock._end", "GraphHooks.install", "GraphHooks._safe", "Row",
    "GraphHooks._make_capture_begin", "GraphHooks._make_capture_end", "GraphHooks._make_replay", "device_asked",
    "of_the_clock", "is_device_point", "DeviceClock._begin_taking", "EventSpans.forget",
}  # fmt: skip


def places() -> Iterator[tuple[Any, str, str]]:
    for module in MODULES:
        yield from _of(module, module, "")


def _of(module: ModuleType, holder: Any, prefix: str) -> Iterator[tuple[Any, str, str]]:
    for name, value in list(vars(holder).items()):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and prefix + name not in LEFT_OUT:
            if name != "__init__" or prefix not in ("DeviceClock.", "StampClock.", "GraphHooks.", "Joiner."):
                yield holder, name, prefix + name
        elif inspect.isclass(value) and value.__module__ == module.__name__ and not prefix:
            yield from _of(module, value, name + ".")


PLACES = {f"{name}": (holder, attribute) for holder, attribute, name in places()}


def injected() -> Any:
    """A function of the runtime that fails."""
    folder = Path(device.__file__).parent
    namespace: dict[str, Any] = {}
    code = "def fault(*_given, **_named):\n    raise RuntimeError('injected')"
    exec(compile(code, str(folder / "made_up.py"), "exec"), namespace)
    return namespace["fault"]


def serve(monkeypatch: pytest.MonkeyPatch, outside: str, spoil: Any) -> tuple[list[Any], int, Taken]:
    """A server's life: what its calls gave, what ran on the device for it, and the clock."""
    sim = Sim()
    monkeypatch.setitem(sys.modules, "torch", sim.torch)
    taken = Taken(clock=sim.clock, outside=outside, inside=True, make_driver=sim.driver)
    taken.clock.follow_graphs()
    ran = [0]
    own = SimStream(sim)

    def kernel() -> int:
        sim.current.push(5_000, lambda _t: ran.__setitem__(0, ran[0] + 1))
        return 7

    spoil()
    step, whole = taken.point(3, stamp=True), taken.point(4)
    graph = sim.torch.cuda.CUDAGraph()
    given: list[Any] = []
    with sim.torch.cuda.graph(graph, own):
        given.append(step(kernel))
    taken.arm()
    for _ in range(12):
        given.append(whole(kernel))
        given.append(whole(graph.replay))
        sim.wait(8_000_000)
        taken.turn()
    sim.wait()
    return given, ran[0], taken


@pytest.mark.parametrize("outside", ["events", "stamps"])
@pytest.mark.parametrize("place", PLACES)
def test_the_server_is_as_without_us(monkeypatch: pytest.MonkeyPatch, outside: str, place: str) -> None:
    holder, attribute = PLACES[place]
    given, ran, taken = serve(monkeypatch, outside, lambda: monkeypatch.setattr(holder, attribute, injected()))
    assert given == [7, *[7, None] * 12]
    assert ran == 24
    taken.clock.leave()


def test_without_a_fault_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    given, ran, taken = serve(monkeypatch, "events", lambda: None)
    assert given == [7, *[7, None] * 12] and ran == 24
    assert taken.spans(3) and taken.spans(4) and taken.graphs() and len(PLACES) > 60


@pytest.mark.parametrize(
    "name", ["events.open", "events.close", "backend.capturing", "backend.query", "backend.elapsed"]
)
def test_a_fault_at_what_is_made_for_a_backend_ends_the_clock_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sim = Sim()
    monkeypatch.setitem(sys.modules, "torch", sim.torch)
    taken = Taken(clock=sim.clock)
    taken.arm()
    call = taken.point(4)
    given = [call(lambda: 7)]
    taken.turn()
    holder, attribute = name.split(".")
    monkeypatch.setattr(getattr(taken.clock, f"_{holder}"), attribute, injected())
    for _ in range(3):
        given.append(call(lambda: 7))
        sim.wait(1_000_000)
        taken.turn()
    assert given == [7] * 4
    assert "injected" in taken.clock.describe()["reason"]
