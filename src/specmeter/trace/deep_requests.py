"""The requests that ran during a run's deep windows: no measurement is of them, but they tell the context's length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.trace.regular import read_regular
from specmeter.trace.requests import Request
from specmeter.trace.strict_json import parse_json
from specmeter.trace.whole import whole

FILE = "requests.json"
_MOST = 1 << 62


def save_requests(folder: Path, requests: Sequence[Request]) -> None:
    """Keep when each ran and how long it was, beside the windows in ``folder``. Raises NotSaved."""
    rows = [[r.send_ns, r.first_ns, r.end_ns, r.prompt_tokens, r.output_tokens] for r in requests if not r.error]
    rows = [row for row in rows if _whole(row)]  # a server that tells no number of tokens has nothing to keep
    with whole(folder / FILE, folder / f".{FILE}.part") as part:
        part.write_text(json.dumps({"format": 1, "requests": rows}))


def load_requests(folder: Path) -> tuple[Request, ...]:
    """The requests beside the windows in ``folder``; none in older runs. Raises SpecmeterError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return ()
    try:
        document = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise SpecmeterError(f"{path} cannot be read", str(error)[:300], "Leave it out.") from error
    rows = document.get("requests") if isinstance(document, dict) and document.get("format") == 1 else None
    if not isinstance(rows, list) or not all(_whole(row) for row in rows):
        raise SpecmeterError(
            f"{path} is damaged", "It holds no requests of the form that is known here.", "Leave it out."
        )
    return tuple(Request(str(i), "", "", 0, *row) for i, row in enumerate(rows))


def context_tokens(requests: Sequence[Request], times: NDArray[np.int64]) -> NDArray[np.float64]:
    """Tokens of context a sequence at each time, the mean over the requests that decode then; NaN where none is known.

    A request's context grows from its prompt by its answer, evenly between its first and last token.
    """
    total, count = np.zeros(len(times)), np.zeros(len(times))
    for request in requests:
        if request.prompt_tokens <= 0 or request.end_ns <= request.first_ns:
            continue
        at = (times >= request.first_ns) & (times <= request.end_ns)
        part = (times[at] - request.first_ns) / (request.end_ns - request.first_ns)
        total[at] += request.prompt_tokens + request.output_tokens * part
        count[at] += 1
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = total / count
    return found


def _whole(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 5 and all(type(n) is int and 0 <= n < _MOST for n in row)
