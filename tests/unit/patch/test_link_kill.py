"""Making a link, killed at every step: it is whole or not there, and the next one tidies up."""

from __future__ import annotations

from pathlib import Path

from specmeter.control.link import Link, links, make_link, remove_link
from tests.support.killed import kill_at

PLAN = {"points": [], "python": {"executable": "python"}}
CODE = {"a.b": bytes(9000), "c": b"code"}


def test_a_link_is_whole_or_not_there(tmp_path: Path) -> None:
    step, absent, whole = 1, 0, 0
    while kill_at(step, lambda: make_link(PLAN, CODE, link_id="one", base=tmp_path)):
        found = links(tmp_path)
        if found:
            assert found == [Link("one", tmp_path / "one")] and found[0].document()["id"] == "one"
            assert sorted(path.name for path in found[0].path.rglob("*.bin")) == ["a.b.bin", "c.bin"]
            whole += 1
        else:
            assert not (tmp_path / "one").exists()
            absent += 1
        for link in found:
            remove_link(link)
        again = make_link(PLAN, CODE, link_id="one", base=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["one"], "what the killed one left is gone"
        remove_link(again)
        step += 1
    assert absent > 10 and whole
