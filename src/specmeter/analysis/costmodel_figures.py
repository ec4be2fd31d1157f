"""Figures that others published: their cycles, break-even, and how well two step counts predict the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.analysis.acceptance_model import conditional_from_lengths, expected_length
from specmeter.analysis.costmodel_checks import FORM, checked, number, whole, word
from specmeter.analysis.moe import Experts
from specmeter.errors import SpecmeterError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ROW = {
    "label", "steps", "draft_tokens", "accept_length", "tok_s", "tpot_ms", "cycle_ms", "phases_ms", "verify_factor",
    "best",
}  # fmt: skip
_SERIES = {"name", "baseline_ms", "baseline_tok_s", "fit", "experts", "verify_ms", "verify_share", "rows"}
# No report drafts so many; acceptance is worked out position by position.
_MOST_STEPS, _MOST_WIDTH, _MOST_ROWS = 256, 65536, 1000


@dataclass(frozen=True)
class Line:
    """One reported setting: ``width`` tokens verified (root included), accept length, tok/s and cycle in ms.

    They are None where not told and not to be had from the others. ``verify_factor`` is what a change did to verify,
    ``best`` that the report calls it the best.
    """

    label: str
    steps: int
    width: int
    accept_length: float | None
    tok_s: float | None
    cycle_ms: float | None
    phases_ms: Mapping[str, float]
    verify_factor: float
    best: bool


@dataclass(frozen=True)
class Series:
    """Lines of one server.

    ``fit`` are step counts to fit on (empty: no prediction asked); ``verify_ms`` is the range of the verify phase and
    ``verify_share`` its share of a cycle, where accept lengths are not told.
    """

    name: str
    baseline_ms: float | None
    fit: tuple[int, ...]
    experts: Experts | None
    verify_ms: tuple[float, float] | None
    verify_share: float | None
    lines: tuple[Line, ...]


def read_figures(path: Path) -> tuple[str, tuple[Series, ...]]:
    """Title and series of a TOML file (docs/explain.md). Raises SpecmeterError that names what is wrong in it."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        form = "Give --figures a TOML file; docs/explain.md shows its form."
        raise SpecmeterError(f"{path} cannot be read.", error.strerror or str(error), form) from None
    except (ValueError, RecursionError) as error:
        raise SpecmeterError(f"{path} is not valid TOML.", str(error), FORM) from None
    tables = document.get("series")
    if not isinstance(tables, list) or not tables:
        raise SpecmeterError(f"{path} has no [[series]].", next_step=FORM)
    return word(document, "title", path.name, str(path)), tuple(_series(table, path) for table in tables)


def _series(table: Any, path: Path) -> Series:
    name = word(table, "name", "unnamed", str(path)) if isinstance(table, dict) else ""
    where = f"{path}, series {name}"
    if not isinstance(table, dict) or set(table) - _SERIES or not isinstance(table.get("rows"), list):
        keys = ", ".join(sorted(_SERIES))
        raise SpecmeterError(f"{where} is not understood.", f"Its keys are {keys}; rows is a list.", FORM)
    if not 0 < len(table["rows"]) <= _MOST_ROWS:
        raise SpecmeterError(f"{where} has {len(table['rows'])} rows.", f"1 to {_MOST_ROWS} are read.", FORM)
    base = number(table, "baseline_ms", where)
    rate = number(table, "baseline_tok_s", where)
    lines = tuple(_line(row, where) for row in table["rows"])
    verify, share = _verify_ms(table, where), number(table, "verify_share", where, most=1.0)
    if verify and share and all(line.tok_s is None for line in lines):
        raise SpecmeterError(
            f"{where}: no row has a speed.",
            "verify_ms and verify_share tell a cycle; with a row's speed they give its accept length.",
            "Give rows tok_s or tpot_ms, or leave verify_ms and verify_share out.",
        )
    return Series(
        name,
        base if base is not None else (1000 / rate if rate else None),
        _fit(table, lines, where),
        Experts.parse(word(table, "experts", "", where)) if "experts" in table else None,
        verify,
        share,
        lines,
    )


def _fit(table: Mapping[str, Any], lines: Sequence[Line], where: str) -> tuple[int, ...]:
    fit = table.get("fit", [])
    if fit == []:
        return ()
    known = {line.steps for line in lines}
    good = isinstance(fit, list) and len(fit) == 2 and all(type(k) is int and k in known for k in fit)
    if not good or fit[0] == fit[1]:
        raise SpecmeterError(
            f"{where}: fit names two step counts among its rows, each once.",
            f"Its rows have {', '.join(map(str, sorted(known)))}.",
            "Write fit = [2, 5], or leave it out.",
        )
    return (fit[0], fit[1])


def _verify_ms(table: Mapping[str, Any], where: str) -> tuple[float, float] | None:
    value = table.get("verify_ms")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise SpecmeterError(
            f"{where}: verify_ms is the range of the verify phase, two numbers.", next_step="Write verify_ms = [21, 28]"
        )
    low, high = (checked(end, "verify_ms", where) for end in value)
    if low > high:
        raise SpecmeterError(f"{where}: verify_ms runs backwards.", next_step=f"Write verify_ms = [{high:g}, {low:g}]")
    return low, high


def _line(row: Any, where: str) -> Line:
    if not isinstance(row, dict) or set(row) - _ROW or "steps" not in row:
        keys = ", ".join(sorted(_ROW))
        raise SpecmeterError(f"{where}: a row is not understood.", f"It needs steps; its keys are {keys}.", FORM)
    steps = whole(row["steps"], "steps", where, 1, _MOST_STEPS)
    length, rate = number(row, "accept_length", where), number(row, "tok_s", where)
    per_token, cycle = number(row, "tpot_ms", where), number(row, "cycle_ms", where)
    if rate is None and per_token is not None:
        rate = 1000 / per_token
    if rate is None and cycle is not None and length is not None:
        rate = 1000 * length / cycle
    if cycle is None and rate is not None and length is not None:
        # One stream gains its accept length once a cycle.
        cycle = 1000 * length / rate
    phases = row.get("phases_ms", {})
    if not isinstance(phases, dict):
        raise SpecmeterError(f"{where}: phases_ms is no table.", next_step="Write phases_ms = { verify = 12.05 }")
    best = row.get("best", False)
    if not isinstance(best, bool):
        raise SpecmeterError(f"{where}: best is neither true nor false.", next_step="Write best = true.")
    factor = number(row, "verify_factor", where)
    return Line(
        word(row, "label", f"{steps} steps", where), steps,
        whole(row.get("draft_tokens", steps + 1), "draft_tokens", where, 1, _MOST_WIDTH), length, rate, cycle,
        {key: checked(ms, f"phases_ms.{key}", where, zero=True) for key, ms in phases.items()},
        1.0 if factor is None else factor, best,
    )  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A step count predicted from the two of ``fit``: ms a token, and its error against the report in percent.

    ``tpot_ms`` takes the reported accept length, ``own_tpot_ms`` one that is predicted from those two as well.
    """

    steps: int
    fitted: bool
    extrapolated: bool
    cycle_ms: float
    tpot_ms: float
    error_percent: float
    own_tpot_ms: float | None
    own_error_percent: float | None


def predict_series(series: Series) -> tuple[Predicted, ...]:
    """Straight line through the two cycles, and a falling acceptance through the two accept lengths.

    Whole cycles are all that a report gives, so a line through totals is all that can be fitted: reliable between the
    two step counts and not beyond them (docs/explain.md).
    """
    lines = {line.steps: line for line in series.lines}
    first, second = (lines[k] for k in series.fit)
    if not (first.cycle_ms and second.cycle_ms and first.accept_length and second.accept_length):
        raise SpecmeterError(
            f"{series.name}: the step counts to fit on need accept length and speed.",
            next_step="Give these rows accept_length and tok_s (or tpot_ms or cycle_ms), or name others in fit.",
        )
    slope = (second.cycle_ms - first.cycle_ms) / (second.steps - first.steps)
    lengths = [(first.steps, first.accept_length), (second.steps, second.accept_length)]
    try:
        rates = conditional_from_lengths(lengths, max(lines))
    except SpecmeterError:
        rates = None
    out = []
    for line in series.lines:
        if line.tok_s is None or line.accept_length is None:
            continue
        cycle = first.cycle_ms + slope * (line.steps - first.steps)
        told, per_token = 1000 / line.tok_s, cycle / line.accept_length
        own = cycle / expected_length(rates, line.steps).tokens if rates is not None else None
        out.append(Predicted(
            line.steps, line.steps in series.fit, not min(series.fit) <= line.steps <= max(series.fit),
            cycle, per_token, 100 * (per_token / told - 1),
            own, 100 * (own / told - 1) if own is not None else None,
        ))  # fmt: skip
    return tuple(out)


def slope_ms(series: Series) -> float | None:
    """ms a further step, least squares over the cycles of chains; None with fewer than two step counts."""
    chains = [line for line in series.lines if line.width == line.steps + 1]
    known = [(line.steps, line.cycle_ms) for line in chains if line.cycle_ms is not None]
    if len({k for k, _ in known}) < 2:
        return None
    mean_k, mean_ms = sum(k for k, _ in known) / len(known), sum(ms for _, ms in known) / len(known)
    spread = sum((k - mean_k) ** 2 for k, _ in known)
    return sum((k - mean_k) * (ms - mean_ms) for k, ms in known) / spread
