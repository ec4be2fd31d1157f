"""What the tests of the runtime share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def stamps_cost_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes measure what a stamp costs; without this variable they do not."""
    monkeypatch.setenv("SPECMETER_STAMPS_COST", "1")
