"""Whether what was read from a run directory has the shape it is written with: one clear error where it has not.

A shape is a mapping of shapes by key (of any keys under ``*``; a leading ``!`` makes one required), a list of one
shape, REAL (a number), NUMBER, TEXT or FIGURE (these may be null), a Maybe, or ANY. Keys that a shape does not name are
left to their readers, so that a run of a newer version can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.trace.cycles import KINDS

REAL, NUMBER, TEXT, FIGURE, ANY = "a real number", "a number", "text", "a number or an interval", "anything"


@dataclass(frozen=True)
class Maybe:
    """A shape that may be null."""

    shape: Any


NUMBERS = {"*": NUMBER}
_INTERVAL = {
    "!low": NUMBER, "!point": NUMBER, "!high": NUMBER, "!level": REAL, "!n": REAL, "!method": TEXT, "!unit": TEXT,
}  # fmt: skip
INTERVAL = Maybe(_INTERVAL)
# A ratio may be infinite, hence null; what was measured is a number.
MEASURED = Maybe({**_INTERVAL, "!point": REAL})
_ROW = {"!name": TEXT, "!ms": REAL, "percent": REAL, "calls": REAL, "p50_ms": REAL, "p95_ms": REAL}
_VERDICT = {"word": TEXT, "sentence": TEXT, "basis": TEXT}
_DRIFT = Maybe({"percent": NUMBER, "p_value": NUMBER, "n": NUMBER})
_CLOCK = {"!host": TEXT, "!rank": REAL, "!offset_ns": REAL, "!drift_ppm": REAL, "!middle_ns": REAL, "!error_ns": NUMBER,
          "!source": TEXT, "note": TEXT}  # fmt: skip
_RANK_SKEW = {
    "!ranks": [ANY], "!cycles": REAL, "!cycle_p50_ms": NUMBER, "!cycle_p95_ms": NUMBER, "!clocks": [_CLOCK],
    "!notes": [TEXT],
    "!arrivals": [
        {
            "!name": TEXT, "!calls": REAL, "!skew_p50_ms": REAL, "!skew_p95_ms": REAL, "!transfer_ms": REAL,
            "!waiting_ms": REAL, "!last_percent": [REAL],
        }
    ],
}  # fmt: skip
_COLLECTIVES = {
    "!cycles": REAL, "!left_out": REAL, "!sentences": [TEXT], "!notes": [TEXT], "setting": TEXT,
    "others": [{"!setting": TEXT, "!sentences": [TEXT]}],
    "!phases": [
        {
            "!phase": TEXT, "!count": REAL, "!by_nccl": REAL, "!ms": MEASURED, "!transfer_ms": NUMBER,
            "!waiting_ms": INTERVAL, "!exposed_ms": REAL, "!busy_ms": REAL, "!percent": REAL,
            "!skew_us": Maybe({"!p50": REAL, "!p95": REAL, "!most": REAL}),
            "!straggler": Maybe({"!rank": REAL, "!percent": REAL, "!behind_ms": REAL}),
        }
    ],
    "!kinds": [
        {
            "!phase": TEXT, "!operation": TEXT, "!backend": TEXT, "!count": REAL, "!bytes": NUMBER, "!us": REAL,
            "!transfer_us": NUMBER, "!waiting_us": NUMBER, "!gb_s": NUMBER,
        }
    ],
    "!ranks": [
        {
            "!host": TEXT, "!rank": REAL, "!ms": REAL, "!waiting_ms": NUMBER, "!last_percent": NUMBER, "!clock": _CLOCK,
        }
    ],
}  # fmt: skip
_DEEP = {
    "!setting": TEXT, "!rank": REAL, "!device": TEXT, "!on_cpu": ANY, "!cycles": REAL, "!clock_error_us": NUMBER,
    "!cycle_inside_ms": MEASURED, "!cycle_outside_ms": MEASURED, "!ratio": MEASURED, "!reason": TEXT,
    "!seconds": NUMBERS, "!lost_ms": {"*": REAL}, "!notes": [TEXT],
    "!top": [{"!phase": TEXT, "!name": TEXT, "!ms": REAL, "!percent": REAL, "!calls": REAL}],
}  # fmt: skip
_PROFILE = {
    "engine": {"name": TEXT, "version": TEXT},
    "setting": TEXT,
    "clock": TEXT,
    "cycle": {
        "mean_ms": MEASURED, "p50_ms": NUMBER, "p95_ms": NUMBER, "count": NUMBER, "kinds": NUMBERS, "dropped": NUMBERS,
        "batch_mean": NUMBER, "drift": _DRIFT,
    },
    "phases": [_ROW],
    "points": [{**_ROW, "phase": TEXT}],
    "frames": [_ROW],
    "beside": [_ROW],
    "draft_steps": [{"step": REAL, "ms": REAL, "cycles": REAL, "parts_ms": NUMBERS}],
    "coverage": {"*": REAL},
    "acceptance": {
        "length_tokens": MEASURED, "sequences": REAL, "reason": TEXT,
        "positions": [{"!position": REAL, "cumulative": NUMBER, "conditional": NUMBER, "reached": REAL}],
    },
    "baseline": {"step_ms": MEASURED, "source": TEXT, "reason": TEXT},
    "break_even_tokens": INTERVAL,
    "expected_speedup": INTERVAL,
    "measured_speedup": INTERVAL,
    "overhead": Maybe({"ms": INTERVAL, "percent": MEASURED, "cycles_in": NUMBER, "cycles_out": NUMBER}),
    "records": {"*": REAL},
    "refused": [{"name": TEXT, "reason": TEXT}],
    "ranks": [{"*": ANY}],
    "phase_stragglers": [{"!phase": TEXT, "!rank": REAL, "!own_ms": REAL, "!others_own_ms": REAL}],
    "rank_skew": Maybe(_RANK_SKEW),
    "collectives": Maybe(_COLLECTIVES),
    "wiring": Maybe({"word": TEXT, "sentence": TEXT}),
    "deep": Maybe([_DEEP]),
    "device": Maybe(
        {
            "idle_ms": INTERVAL, "idle_percent": NUMBER, "busy_ms": NUMBER, "cycles": NUMBER,
            "windows": [
                {
                    "!reason": TEXT, "!notes": [TEXT], "verdict": Maybe({"!word": TEXT, "!sentence": TEXT}),
                    "cycles": Maybe({"steps": NUMBER, "batch": NUMBER}), "bound": Maybe({"word": TEXT}),
                    "draft_steps": [{"!step": NUMBER, "!ms": REAL}],
                    "phases": [{"!phase": TEXT, "!graph_launches": REAL, "!busy_ms": REAL}],
                }
            ],
        }
    ),
    "verify_width": Maybe({"!sentence": TEXT, "!classes": [{"!class": TEXT}]}),
    "verdict": _VERDICT,
}  # fmt: skip
_SWEEP = {
    "threshold": NUMBER,
    "arms": [
        {
            "!setting": TEXT, "settings": NUMBERS, "requests": NUMBER, "failed": NUMBER, "tokens_per_s": INTERVAL,
            "accept_length_tokens": FIGURE, "cycle_ms": FIGURE, "break_even_tokens": FIGURE, "ratio": INTERVAL,
            "drift": _DRIFT, "verdict": TEXT, "reason": TEXT,
        }
    ],
    "best": TEXT,
    "verdict": _VERDICT,
}  # fmt: skip
_ANALYSES = {"profile": _PROFILE, "sweep": _SWEEP}
_DOCUMENTS: dict[str, Any] = {
    "run.json": {
        "id": TEXT, "command": [TEXT], "status": TEXT, "version": TEXT, "settings": [TEXT], "prompts": TEXT,
        "seed": NUMBER, "created_ns": NUMBER, "env": {"*": TEXT},
        "machine": {"system": TEXT, "machine": TEXT, "cpus": NUMBER},
    },
    "plan.json": {
        "engine": TEXT, "engine_version": TEXT, "points": [{"!name": TEXT, "role": TEXT, "id": NUMBER, "*": ANY}],
        "refused": [{"name": TEXT, "reason": TEXT}], "value_ids": NUMBERS, "modes": Maybe({"*": [NUMBER]}),
        "python": Maybe({"*": ANY}),
    },
}  # fmt: skip

_TEXTS, _WHOLE, _FLAGS = "text", "whole numbers", "flags"
_COLUMNS: dict[str, dict[str, str]] = {
    "cycles": {
        **dict.fromkeys(("host", "kind", "setting", "prompt_id", "dropped"), _TEXTS),
        **dict.fromkeys(
            ("rank", "cycle", "t0_ns", "dur_ns", "batch", "steps", "drafted", "accepted", "sampled", "probed"), _WHOLE
        ),
    },
    "spans": {
        **dict.fromkeys(("host", "point", "clock"), _TEXTS),
        **dict.fromkeys(("pid", "rank", "cycle", "step", "t0_ns", "dur_ns", "self_ns"), _WHOLE),
        "inside": _FLAGS,
    },
    "requests": {
        **dict.fromkeys(("request_id", "prompt_id", "setting", "error"), _TEXTS),
        **dict.fromkeys(("block", "send_ns", "first_ns", "end_ns", "prompt_tokens", "output_tokens", "start"), _WHOLE),
    },
}  # fmt: skip


def check_document(path: Path, document: object) -> dict[str, Any]:
    """The document of ``path`` (run.json, plan.json, analysis.json) if it has the shape it should.

    Raises SpecmeterError that names the place where it has not.
    """
    shape: Any = _DOCUMENTS.get(path.name, {})
    if path.name == "analysis.json" and isinstance(document, Mapping):
        kind = document.get("kind")
        shape = _ANALYSES.get(kind, {"verdict": Maybe(_VERDICT)}) if isinstance(kind, str) else {"kind": TEXT}
    fault = _fault(document, shape, "")
    if fault or not isinstance(document, dict):
        raise damaged(str(path), fault)
    return document


def check_table(
    folder: Path, name: str, columns: Mapping[str, NDArray[Any]], some: Sequence[str] | None = None
) -> None:
    """Raise SpecmeterError unless a table of a run has the columns, types and ranges that it is written with.

    ``some`` are the columns that were asked for, where that was not all.
    """
    wanted = _COLUMNS.get(name)
    if wanted is not None and some is not None:
        wanted = {key: kind for key, kind in wanted.items() if key in some}
    if wanted is None or not columns:
        return
    gone = [column for column in wanted if column not in columns]
    if gone:
        raise damaged(f"The table {name} of {folder}", f"It lacks the column{'s' * (len(gone) > 1)} {', '.join(gone)}.")
    if len({len(column) for column in columns.values()}) != 1:
        raise damaged(f"The table {name} of {folder}", "Its columns differ in length.")
    wrong = [f"{column} holds no {kind}" for column, kind in wanted.items() if not _is(columns[column], kind)]
    if not wrong:
        wrong = list(_out_of_range(name, columns))
    if wrong:
        raise damaged(f"The table {name} of {folder}", f"{'; '.join(wrong)}.")


def damaged(what: str, why: str) -> SpecmeterError:
    """The error for something of a run that does not have its shape."""
    return SpecmeterError(
        f"{what} is damaged", why, "Copy the run again from where it was recorded, or record it anew."
    )


def _fault(value: object, shape: Any, where: str) -> str:
    """What is wrong with ``value``, empty if nothing is."""
    if shape == FIGURE:
        shape = INTERVAL if isinstance(value, Mapping) else NUMBER
    if isinstance(shape, Maybe):
        return "" if value is None else _fault(value, shape.shape, where)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _is_not(value, "a list", where)
        found = (_fault(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), "")
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            return _is_not(value, "an object", where)
        return next(filter(None, (_fault_at(value, key, part, where) for key, part in shape.items())), "")
    wanted = shape == REAL or (shape == NUMBER and value is not None)
    if wanted and (isinstance(value, bool) or not isinstance(value, int | float)):
        return _is_not(value, "a number", where)
    return _is_not(value, "text", where) if shape == TEXT and not isinstance(value, str | None) else ""


def _fault_at(value: Mapping[str, Any], key: str, shape: Any, where: str) -> str:
    if key == "*":
        return next(filter(None, (_fault(item, shape, f"{where}.{name}") for name, item in value.items())), "")
    name = key.removeprefix("!")
    if name not in value:
        return f"{where.lstrip('.') or 'It'} lacks {name}." if key != name else ""
    return _fault(value[name], shape, f"{where}.{name}")


def _is_not(value: object, wanted: str, where: str) -> str:
    # The value itself may be anything, also what a terminal would act on: its type is enough.
    return f"{ascii(where.lstrip('.') or 'The document')[1:-1]} is not {wanted} but {type(value).__name__}."


def _is(column: NDArray[Any], kind: str) -> bool:
    if kind == _TEXTS:
        return column.dtype.kind == "U" or (column.dtype.kind == "O" and set(map(type, column.tolist())) <= {str})
    return column.dtype.kind in ("b" if kind == _FLAGS else "iu")


def _out_of_range(name: str, columns: Mapping[str, NDArray[Any]]) -> list[str]:
    found = []
    if name != "requests" and len(columns.get("dur_ns", ())) and int(columns["dur_ns"].min()) < 0:
        found.append("dur_ns is negative somewhere")
    if name == "cycles" and len(columns["cycle"]):
        cycle = columns["cycle"]
        # Cycles of a rank are numbered from 0 on, a row each; readers make arrays of that size.
        if int(cycle.min()) < 0 or int(cycle.max()) >= len(cycle):
            found.append("cycle goes beyond the number of rows")
        if not np.isin(columns["kind"].astype(str), KINDS).all():
            found.append("kind holds something that is no kind of cycle")
    return found
