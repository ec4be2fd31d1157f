"""A dozen kills, drops and full disks: the short form of ``benchmarks/fault_campaign.py``."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator

import pytest

from tests.support.fault_events import Event, Scene, drawn, happen
from tests.support.fault_scenes import mini_scene
from tests.support.loopback_ssh import USABLE, WHY_NOT

pytestmark = [pytest.mark.skipif(not USABLE, reason=WHY_NOT), pytest.mark.timeout(400)]
# A profile that is killed outright waits for its watchdog's 30 s: the long campaign has those.
EVENTS = (
    ("kill controller", "apply"),
    ("kill ssh client", "apply"),
    ("drop connection", "apply"),
    ("disk full", "apply"),
    ("kill controller", "restore"),
    ("kill sshd session", "restore"),
    ("SIGTERM", "restore"),
    ("disk full", "restore"),
    ("kill controller", "arm"),
    ("drop connection", "arm"),
    ("disk full", "disarm"),
    ("SIGINT", "profile"),
)
TYPICAL_S = 0.6  # of an operation on a quiet machine; any moment is a good one


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    try:
        with mini_scene(tmp_path_factory.mktemp("faults"), secrets.token_hex(8)) as found:
            yield found
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("number", range(len(EVENTS)), ids=[f"{kind}-{operation}" for kind, operation in EVENTS])
def test_a_fault_leaves_nothing_and_the_server_answers(scene: Scene, number: int) -> None:
    event: Event = drawn(random.Random(number), number, *EVENTS[number])
    if event.kind != "disk full":
        event.delay_s *= TYPICAL_S
    elif event.operation != "apply":
        event.delay_s = 0.0  # not one byte of room
    happen(scene, event)
    assert event.faults == [], event
    assert scene.serving.bad == []
