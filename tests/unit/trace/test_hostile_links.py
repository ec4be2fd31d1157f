"""Plans, reports and windows that no specmeter wrote: one plain error, or nothing taken from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specmeter.errors import SpecmeterError
from specmeter.runtime import layout
from specmeter.trace import load_link, load_rings
from specmeter.trace.deep import load_deep
from specmeter.trace.joining import _parents
from specmeter.trace.synthetic import make_plan, make_records, write_ring
from tests.support.deep_files import played

DEEP = "[" * 200_000
PLAN = make_plan([("cycle", "cycle", "none")], ["cycle.drafted"])
ROWS = [
    (1_000, 2_000, 1, 1, layout.KIND_HOST_SPAN, 0, 0),
    (3, 2_100, 1, 2, layout.KIND_VALUE, 0, 0),
    (3_000, 4_000, 2, 1, layout.KIND_HOST_SPAN, 0, 0),
]


@pytest.mark.parametrize("text", [DEEP, '{"points": NaN}', '{"points": [], "x": 1e999}', "[1]", "\xff"])
def test_a_plan_of_a_link_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecmeterError, match=r"plan .*(cannot be read|malformed)"):
        load_link(tmp_path)


@pytest.mark.parametrize("identity", [70_000, -1, 0, 1 << 62])
def test_a_value_that_no_record_can_have_is_a_malformed_plan(tmp_path: Path, identity: int) -> None:
    ring = write_ring(tmp_path / "1-1.ring", make_records(ROWS))
    assert load_rings([ring], PLAN).main.cycles.drafted[0] == 3
    with pytest.raises(SpecmeterError, match="malformed"):
        load_rings([ring], {**PLAN, "value_ids": {"cycle.drafted": identity}})


@pytest.mark.parametrize("text", [DEEP, '{"lanes": 7}', '{"lanes": [{"lane": "x"}, 3]}', "[]"])
def test_a_report_beside_a_window_that_names_no_threads_is_passed_over(tmp_path: Path, text: str) -> None:
    files = played(tmp_path, count=3)
    files.write()
    [ring] = tmp_path.glob("*.ring")
    ring.with_suffix(".json").write_text(text)
    [window] = load_deep(tmp_path)
    assert any("is not named in the ring" in note for note in window.notes)
    assert _parents(ring) == []


def test_a_plan_beside_a_window_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    played(tmp_path, count=3).write()
    (tmp_path / "plan.json").write_text(DEEP)
    with pytest.raises(SpecmeterError, match="cannot be read"):
        load_deep(tmp_path)
