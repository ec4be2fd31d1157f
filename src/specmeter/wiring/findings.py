"""What the check has to say: findings with a severity, a cause and a cure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How bad a finding is; only errors turn the exit code to 1."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


@dataclass(frozen=True)
class Finding:
    """One fault or remark.

    ``id`` is stable and meant for scripts, ``what`` the fact, ``cause`` why it came about or matters, ``cure`` what to
    change. ``engine`` names the engine it holds for (empty: all of them), ``where`` a file and line.
    """

    id: str
    severity: Severity
    what: str
    cause: str = ""
    cure: str = ""
    engine: str = ""
    where: str = ""

    def as_json(self) -> dict[str, object]:
        """The finding as an object of the ``--json`` output."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "engine": self.engine or None,
            "what": self.what,
            "cause": self.cause,
            "cure": self.cure,
            "where": self.where or None,
        }


def error(id: str, what: str, cause: str = "", cure: str = "", engine: str = "", where: str = "") -> Finding:
    """A finding of severity error."""
    return Finding(id, Severity.ERROR, what, cause, cure, engine, where)


def warning(id: str, what: str, cause: str = "", cure: str = "", engine: str = "", where: str = "") -> Finding:
    """A finding of severity warning."""
    return Finding(id, Severity.WARNING, what, cause, cure, engine, where)


def note(id: str, what: str, cause: str = "", cure: str = "", engine: str = "", where: str = "") -> Finding:
    """A finding of severity note."""
    return Finding(id, Severity.NOTE, what, cause, cure, engine, where)


def in_order(findings: list[Finding]) -> list[Finding]:
    """The findings without repetitions, errors first, otherwise in the order they were made."""
    unique = list(dict.fromkeys(findings))
    return sorted(unique, key=lambda finding: _ORDER[finding.severity])
