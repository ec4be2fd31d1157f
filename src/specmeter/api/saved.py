"""A saved run in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.api.display import colours, diff_html, run_html
from specmeter.errors import SpecmeterError
from specmeter.exports.data import TABLES, arrow_table
from specmeter.exports.timeline import Timeline, build_timeline
from specmeter.reporters.inert import inert
from specmeter.trace.rundir import Run
from specmeter.trace.rundir import load as load_run

ANALYSIS_TABLES = ("phases", "points", "frames", "draft_steps", "positions", "arms")
PLOTS = ("cycle", "positions", "speed")


@dataclass(frozen=True)
class Plot:
    """A chart as SVG; notebooks show it by themselves."""

    title: str
    svg: str

    def _repr_html_(self) -> str:
        return f'<div style="{colours()}">{self.svg}</div>'

    def save(self, path: Path | str) -> Path:
        """Write the SVG into a page of its own, with the colours it needs."""
        out = Path(path)
        out.write_text(f"<!doctype html><meta charset=utf-8>{self._repr_html_()}", encoding="utf-8")
        return out


@dataclass(frozen=True)
class RunDiff:
    """Two runs side by side: ``document`` is specmeter/diff/1 (docs/diff.md)."""

    document: Mapping[str, Any]

    def __str__(self) -> str:
        from specmeter.reporters.diff_view import render_diff

        return render_diff(self.document)

    def _repr_html_(self) -> str:
        return diff_html(self.document)


@dataclass(frozen=True)
class SavedRun(Run):
    """A saved run: ``.run .plan .analysis`` are dicts, ``.cycles .spans .requests`` dicts of numpy columns.

    In a notebook its last line is its verdict and phase table.
    """

    def table(self, name: str) -> Any:
        """A pyarrow.Table: ``cycles``, ``spans``, ``requests``, or one of the analysis (``phases``, ``points``, ...).

        Raises SpecmeterError for another name, where the run has no such table, and without pyarrow (extra ``data``).
        """
        if name in TABLES:
            columns: dict[str, Any] = getattr(self, name)
        elif name in ANALYSIS_TABLES:
            columns = self._analysis_table(name)
        else:
            known = ", ".join((*TABLES, *ANALYSIS_TABLES))
            raise SpecmeterError(f"There is no table {inert(name)}", f"Tables are {known}.")
        if not columns:
            raise SpecmeterError(
                f"{self.path} has no table {name}", f"Its analysis is {self.analysis.get('kind', 'none')}."
            )
        return arrow_table(columns, name, str(self.run.get("id", "")))

    def frame(self, name: str = "cycles") -> Any:
        """A pandas.DataFrame of ``table(name)``. Raises SpecmeterError without pandas, which no extra installs."""
        try:
            import pandas
        except ImportError as error:
            raise SpecmeterError(
                "Data frames need pandas",
                "It is not installed here.",
                "pip install pandas, or use .table(name) (pyarrow).",
            ) from error
        columns = getattr(self, name, None) if name in TABLES else None
        # Without pyarrow the numpy columns serve as well.
        return pandas.DataFrame(columns) if columns else self.table(name).to_pandas()

    def plot(self, name: str = "cycle") -> Plot:
        """A chart of the report: ``cycle``, ``positions`` (acceptance) or ``speed`` (a sweep's arms).

        Raises SpecmeterError for another name, where the run has nothing to show, and without vl-convert (extra
        ``html``).
        """
        from specmeter.reporters.html.acceptance_charts import positions_chart
        from specmeter.reporters.html.cycle_charts import cycle_chart
        from specmeter.reporters.html.speed_charts import speed_chart

        kind = self.analysis.get("kind")
        if name not in PLOTS:
            raise SpecmeterError(f"There is no plot {inert(name)}", f"Plots are {', '.join(PLOTS)}.")
        if kind != ("sweep" if name == "speed" else "profile"):
            raise SpecmeterError(f"{self.path} has nothing for the plot {name}", f"Its analysis is {kind or 'none'}.")
        draw: dict[str, tuple[str, Callable[[], str]]] = {
            "cycle": ("The mean cycle", lambda: cycle_chart(self.analysis)),
            "positions": ("Kept by draft position", lambda: positions_chart(self.analysis["acceptance"]["positions"])),
            "speed": ("Decode rate by setting", lambda: speed_chart(self.analysis)),
        }
        title, make = draw[name]
        return Plot(title, make())

    def page(self) -> str:
        """The whole report as one HTML page. Raises SpecmeterError without vl-convert."""
        from specmeter.reporters.html import render_page

        return render_page(self)

    def timeline(self, first: int = 0, last: int | None = None) -> Timeline:
        """The lanes of the cycles ``first`` to before ``last``, as the exports write them."""
        return build_timeline(self, first, last)

    def diff(self, other: Run) -> RunDiff:
        """This run (A) against another (B)."""
        from specmeter.analysis.diff import diff_runs

        return RunDiff(diff_runs(self, other))

    @property
    def children(self) -> dict[str, Run]:
        """The runs below this one (arms, trials, starts) by name; SavedRuns too."""
        return {name: _as_saved(run) for name, run in super().children.items()}

    def _analysis_table(self, name: str) -> dict[str, list[Any]]:
        rows = (self.analysis.get("acceptance") or {}).get(name) if name == "positions" else self.analysis.get(name)
        plain = [{k: v for k, v in row.items() if not isinstance(v, dict | list)} for row in rows or []]
        return {key: [row.get(key) for row in plain] for key in plain[0]} if plain else {}

    def _repr_html_(self) -> str:
        return run_html(self)


def load(path: Path | str) -> SavedRun:
    """Read a run directory. Raises SpecmeterError when it is none, or of an unknown schema."""
    return _as_saved(load_run(path))


def _as_saved(run: Run) -> SavedRun:
    return SavedRun(run.path, run.run, run.plan, run.analysis, run.report)
