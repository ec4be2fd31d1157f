"""The journal: append only, one holder, one kind of work."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

import specmeter.tune.journal as journal_module
from specmeter.engines import Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.tune.journal import Journal
from specmeter.tune.space import AS_GIVEN, Candidate
from specmeter.tune.trial import Observation

FACTS = {"engine": "embedded", "model": "M"}


def test_events_come_back_in_order_and_nothing_can_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, FACTS) as journal:
        for number in range(3):
            journal.add("trial", {"n": number})
    with Journal(path, FACTS) as journal:
        assert [event["n"] for event in journal.events("trial")] == [0, 1, 2] and not list(journal.events("proof"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    raw = sqlite3.connect(path)
    for statement in ("DELETE FROM events", "UPDATE events SET data = '{}'", "UPDATE facts SET value = 'x'"):
        with pytest.raises(sqlite3.DatabaseError, match="append only"):
            raw.execute(statement)
    raw.close()


def test_two_tunes_on_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, FACTS), pytest.raises(SpecmeterError, match="Another tune") as caught:
        Journal(path, FACTS)
    assert caught.value.exit == Exit.REFUSED
    Journal(path, FACTS).close()


def test_another_model_or_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.sqlite"
    Journal(path, FACTS).close()
    with pytest.raises(SpecmeterError, match="other work") as caught:
        Journal(path, {**FACTS, "model": "another"})
    assert caught.value.exit == Exit.REFUSED and "model is M there and another now" in caught.value.why
    monkeypatch.setattr(journal_module, "__version__", "99.0")
    with pytest.raises(SpecmeterError, match="other work"):
        Journal(path, FACTS)
    monkeypatch.undo()
    Journal(path, FACTS).close()


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"this is no database, but long enough to look like a file" * 40)
    with pytest.raises(SpecmeterError, match="Not a journal"):
        Journal(path, FACTS)
    assert path.read_bytes().startswith(b"this is no database")


@pytest.mark.parametrize("statement", ["CREATE TABLE facts (name TEXT, value TEXT)", "PRAGMA user_version = 7"])
def test_a_database_of_something_else_stays_as_it_is(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "app data.sqlite"
    raw = sqlite3.connect(path)
    raw.execute(statement)
    raw.commit()
    raw.close()
    before = path.read_bytes()
    with pytest.raises(SpecmeterError, match="Not a journal") as caught:
        Journal(path, FACTS)
    assert caught.value.exit == Exit.REFUSED and "something else" in caught.value.why
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_damaged_journal_is_said(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, FACTS) as journal:
        journal.add("trial", {"n": 1})
        journal._db.execute("INSERT INTO events (time_ns, kind, data) VALUES (0, 'trial', '{')")
        with pytest.raises(SpecmeterError, match="cannot be read"):
            list(journal.events("trial"))


def test_observations_survive_the_journal(tmp_path: Path) -> None:
    candidate = Candidate(Setting.of(4, 4, 12), (("--a", "1"),), (("B", "2"),))
    told = Observation(candidate, 8, 3, (1.5, 1.25), 12.0, "", True, 2.5)
    own = Observation(Candidate(AS_GIVEN, own=True), 8, 4, (1.5,), 2.0, told="k=3")
    with Journal(tmp_path / "j.sqlite", FACTS) as journal:
        journal.add("trial", told.as_json())
        journal.add("trial", own.as_json())
        assert [Observation.from_json(event) for event in journal.events("trial")] == [told, own]


def test_a_disk_that_is_full_is_said_and_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, FACTS) as journal:
        journal.add("trial", {"n": 1})
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own answer to a full disk
        with pytest.raises(SpecmeterError, match="cannot be written") as caught:
            journal.add("trial", {"n": "x" * 100_000})
        assert caught.value.exit == Exit.ENVIRONMENT and "full" in caught.value.why
    with Journal(path, FACTS) as journal:
        assert [event["n"] for event in journal.events("trial")] == [1]
