"""The one error that users see, and the exit codes of every command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes shared by all commands."""

    DONE = 0
    FINDING = 1
    USAGE = 2
    REFUSED = 3
    SERVER_FAILED = 4
    ENVIRONMENT = 5
    INTERNAL = 6
    INTERRUPTED = 130


class SpecmeterError(Exception):
    """A failure explained to the user.

    ``what`` names the thing that is wrong, ``why`` the reason, ``next_step`` what to do about it, and ``exit``
    the process's exit code.
    """

    def __init__(self, what: str, why: str = "", next_step: str = "", exit: Exit = Exit.USAGE) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next_step = next_step
        self.exit = exit

    def as_json(self) -> dict[str, object]:
        """The error object of ``--json`` output: what, why, next, exit."""
        return {"what": self.what, "why": self.why, "next": self.next_step, "exit": int(self.exit)}

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why:  {self.why}")
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)


def needs_extra(what: str, why: str, extra: str, otherwise: str = "") -> SpecmeterError:
    """The error where the packages of an optional extra are missing; ``otherwise`` names another way out, if any."""
    step = f"Run `pip install -e '.[{extra}]'` in the checkout{otherwise}."
    return SpecmeterError(what, why, step, Exit.ENVIRONMENT)
