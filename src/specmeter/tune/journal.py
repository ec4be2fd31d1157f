"""The journal of a tune: SQLite, rows are only ever added, so an interrupted run goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.errors import Exit, SpecmeterError

FORMAT = "specmeter/journal/1"
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, time_ns INTEGER NOT NULL,
    kind TEXT NOT NULL, data TEXT NOT NULL);
CREATE TRIGGER IF NOT EXISTS events_keep BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'append only'); END;
CREATE TRIGGER IF NOT EXISTS events_stay BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'append only'); END;
CREATE TRIGGER IF NOT EXISTS facts_keep BEFORE UPDATE ON facts BEGIN SELECT RAISE(ABORT, 'append only'); END;
CREATE TRIGGER IF NOT EXISTS facts_stay BEFORE DELETE ON facts BEGIN SELECT RAISE(ABORT, 'append only'); END;
"""


_NAMES = {"facts", "events", "events_keep", "events_stay", "facts_keep", "facts_stay"}


class Journal:
    """An open journal; holds a lock for as long as it is open. Use it in a ``with`` block."""

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        """Open or make the journal at ``path`` for work described by ``facts`` (model, engine version, load ...).

        Raises SpecmeterError (exit 3) if another tune holds it, or if it was written for other facts, another version
        of specmeter, or is no journal.
        """
        self.path = path
        self._refuse_foreign()  # before anything is written, its lock's file beside it included
        self._lock = self._locked()
        try:
            self._db = self._opened()
            self._check({"format": FORMAT, "specmeter": __version__, **facts})
        except BaseException:
            os.close(self._lock)
            raise

    def _refuse_foreign(self) -> None:
        """Look at a file that is there, read-only: one that is none of ours must stay as it is."""
        try:
            if self.path.stat().st_size == 0:
                return
        except OSError:
            return  # new, or what opening it says
        try:
            # immutable: no file beside it is made or waited for.
            uri = f"{self.path.resolve().as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
                names = {str(name) for (name,) in database.execute("SELECT name FROM sqlite_master")}
        except sqlite3.OperationalError:
            return
        except sqlite3.DatabaseError as error:
            if self.path.with_name(self.path.name + "-journal").exists():
                return  # SQLite takes back what a crash left half-written once it opens it
            raise self._not_ours(f"{error}.") from None
        if not names >= _NAMES:
            raise self._not_ours("It is a database of something else.")

    def _not_ours(self, why: str) -> SpecmeterError:
        step = "Name another file; this one was left as it is."
        return SpecmeterError(f"Not a journal of specmeter: {self.path}", why, step, Exit.REFUSED)

    def _locked(self) -> int:
        try:
            handle = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise SpecmeterError(
                f"The journal cannot be opened: {self.path}", error.strerror or str(error), exit=Exit.ENVIRONMENT
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise SpecmeterError(
                f"Another tune is using this journal: {self.path}",
                "Two tunes on one machine would also disturb each other's timings.",
                "Wait for it, or name another journal with --journal.",
                Exit.REFUSED,
            ) from None
        return handle

    def _opened(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise self._unwritten(error.strerror or str(error)) from None
        database = sqlite3.connect(self.path, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous = FULL")
            database.executescript(_TABLES)
        except sqlite3.OperationalError as error:  # the disk's fault, not the file's
            database.close()
            raise self._unwritten(str(error)) from None
        except sqlite3.DatabaseError as error:
            database.close()
            raise self._not_ours(f"{error}.") from None
        return database

    def _unwritten(self, reason: str) -> SpecmeterError:
        return SpecmeterError(
            f"The journal cannot be written: {self.path}",
            f"{reason}.",
            f"Every finished start is kept. Make room there, and go on with --journal {self.path}.",
            Exit.ENVIRONMENT,
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """All that is inserted inside, or nothing of it."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise self._unwritten(str(error)) from None

    def _check(self, facts: Mapping[str, str]) -> None:
        known = dict(self._db.execute("SELECT name, value FROM facts"))
        if not known:
            with self._writing():
                self._db.executemany("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
            return
        for name, value in facts.items():
            if known.get(name) != value:
                self._db.close()
                raise SpecmeterError(
                    f"The journal belongs to other work: {self.path}",
                    f"{name} is {known.get(name, 'not named')} there and {value} now; its trials are not comparable.",
                    "Name another journal with --journal, or go back to what it was made with.",
                    Exit.REFUSED,
                )

    def add(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append one event, on disk when this returns. Raises SpecmeterError (exit 5) where the disk is full."""
        text = json.dumps(data, allow_nan=False, sort_keys=True)
        with self._writing():
            self._db.execute("INSERT INTO events (time_ns, kind, data) VALUES (?, ?, ?)", (time.time_ns(), kind, text))

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """The events of one kind in the order they were added."""
        try:
            for (data,) in self._db.execute("SELECT data FROM events WHERE kind = ? ORDER BY id", (kind,)):
                yield json.loads(data)
        except (sqlite3.Error, ValueError) as error:
            raise SpecmeterError(
                f"The journal cannot be read: {self.path}",
                f"{error}.",
                "It is damaged: begin a new one without --journal.",
                Exit.ENVIRONMENT,
            ) from None

    def close(self) -> None:
        """Close it and let the lock go; may be called twice."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
