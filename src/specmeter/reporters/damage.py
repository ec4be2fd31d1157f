"""Documents that do not have the shape they should: one clear error in place of a fault of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specmeter.errors import SpecmeterError
from specmeter.reporters.inert import inert

_SHAPE = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise SpecmeterError saying that ``what`` is damaged where the code inside trips over its shape."""
    try:
        yield
    except _SHAPE as error:
        why = f"{type(error).__name__}: {inert(error, 200)}"
        raise SpecmeterError(f"{what} is damaged or incomplete", why, "Record again.") from error
