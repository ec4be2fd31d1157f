"""The sections of a tune: the search as it went, with intervals, and the proof of its winner."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.analysis.stats import mean_interval
from specmeter.reporters.html.charts import axis, draw, label
from specmeter.reporters.html.compare_section import compare_sections
from specmeter.reporters.html.markup import Section, beside, cards, figure, paragraph, table, text
from specmeter.reporters.numbers import number, point, span
from specmeter.trace.rundir import Run
from specmeter.trace.strict_json import parse_json

Document = Mapping[str, Any]
MOST_TRIALS = 400


@dataclass(frozen=True)
class Trial:
    """One candidate in one start, tok/s with the ends of its interval over blocks (None: fewer than two, or failed)."""

    name: str
    level: int
    rate: float | None
    low: float | None
    high: float | None
    cause: str
    stopped: bool


def tune_figures(document: Document) -> str:
    """The winner of the first level and what it took."""
    level = document["levels"][0]
    search, winner = level["search"], level["winner"]["label"]
    tried = next((row for row in search["tried"] if row["label"] == winner), None)
    facts = [("Winner", winner, f"{tried['tokens_per_s']:.1f} tok/s in the search" if tried else "")]
    for row in level["proof"]["pairs"] if level["proof"] else []:
        if row["arm"] == "tuned" and row["ratio"]:
            below = f"95 % {span(row['ratio'])}, {row['verdict']}"
            facts.append((f"Against the {row['against']}", f"{point(row['ratio'])} x", below))
    facts.append(("Search", f"{search['starts']} starts", f"{search['server_s']:.0f} s; ended by {search['ended_by']}"))
    return cards(facts)


def tune_sections(run: Run, prefix: str = "") -> list[Section]:
    """The sections of a document of kind ``tune``: one a level of concurrency, each with its proof."""
    document, trials = run.analysis, read_trials(run.path / "journal.sqlite")
    sections = []
    for level in document["levels"]:
        at = level["concurrency"]
        own = [trial for trial in trials if trial.level == at][:MOST_TRIALS]
        name = f"The search at {at} request{'s' if at != 1 else ''} at once"
        section = Section(name, f"{prefix}search-{at}").add(paragraph(level["verdict"]["sentence"]))
        if any(trial.rate is not None for trial in own):
            note = "Trials in the order they ran, with the interval over their blocks; the line is the best so far."
            section.add(beside(figure(search_chart(own), "The search as it went", note), _trials(own)))
        sections.append(section.add(_tried(level), *_left_out(level)))
        if level["proof"]:
            sections += compare_sections(level["proof"], f"{prefix}proof-{at}-", f"Proof at {at}, starts of their own")
    skipped = [(row["name"], row["reason"]) for row in document["space"]["skipped"]]
    if skipped:
        sections[0].add(table(("left out of the space", "why"), skipped, "Dimensions left out", (0, 1)))
    if document.get("command_line"):
        sections[-1].add("<h3>The command</h3>", f'<pre tabindex="0">{text(document["command_line"], 20_000)}</pre>')
    return sections


def read_trials(path: Path) -> list[Trial]:
    """The trials of a journal in the order they ran; empty where there is none or it cannot be read."""
    rows: list[tuple[str]] = []
    if path.is_file():
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database,
        ):
            rows = database.execute("SELECT data FROM events WHERE kind = 'trial' ORDER BY id LIMIT 10000").fetchall()
    found = []
    for (data,) in rows:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
            found.append(_trial(parse_json(data)))
    return found


def _trial(event: Mapping[str, Any]) -> Trial:
    extra = [f"{key}={value}" for part in ("flags", "env") for key, value in event[part].items()]
    name = " ".join([str(event["setting"]["label"]), *extra])
    logs = [float(value) for value in event["logs"]]
    if not logs or event["cause"]:
        return Trial(name, int(event["level"]), None, None, None, str(event["cause"]), bool(event["stopped"]))
    found = mean_interval(logs, "block")
    low, high = (math.exp(found.low), math.exp(found.high)) if math.isfinite(found.low + found.high) else (None, None)
    return Trial(name, int(event["level"]), math.exp(found.point), low, high, "", bool(event["stopped"]))


def search_chart(trials: Sequence[Trial]) -> str:
    """Rates over the order of trials, and the best so far."""
    rows: list[dict[str, Any]] = []
    best = 0.0
    for i, trial in enumerate(trials, 1):
        if trial.rate is None:
            continue
        best = max(best, trial.rate)
        said = f" [{trial.low:.1f}, {trial.high:.1f}]" if trial.low and trial.high else ""
        text = f"{i}. {trial.name}: {trial.rate:.1f} tok/s{said}{', raced out' if trial.stopped else ''}"
        ends = {"low": trial.low or trial.rate, "high": trial.high or trial.rate}
        rows.append({"trial": i, "rate": trial.rate, "best": best, "label": text, **ends})
    x = {
        "field": "trial",
        "type": "quantitative",
        "axis": axis("trial", tickMinStep=1),
        "scale": {"nice": False, "padding": 14},
    }
    y = {"field": "rate", "type": "quantitative", "axis": axis("tok/s"), "scale": {"zero": False}}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "line", "interpolate": "step-after", "color": "var(--s1)", "aria": False},
            "encoding": {"x": x, "y": {**y, "field": "best"}},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 2, "color": "var(--s0)", "aria": False},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1, "color": "var(--s0)"},
            "encoding": {"x": x, "y": y, "description": label()},
        },
    ]
    return draw({"layer": layers, "height": 220}, rows)


def _trials(trials: Sequence[Trial]) -> str:
    rows = [
        (
            i, trial.name, number(trial.rate, 1),
            f"{trial.low:.1f}-{trial.high:.1f}" if trial.low and trial.high else "-",
            f"infeasible: {trial.cause}" if trial.cause else "raced out" if trial.stopped else "",
        )
        for i, trial in enumerate(trials, 1)
    ]  # fmt: skip
    return table(("trial", "candidate", "tok/s", "95 % interval", ""), rows, "The journal", (0, 1, 4))


def _tried(level: Document) -> str:
    rows = [
        (
            row["label"] + (" (winner)" if row["label"] == level["winner"]["label"] else ""), row["starts"],
            number(row["tokens_per_s"], 1), number(row["predicted_tokens_per_s"], 1),
            "raced out" if row["raced_out"] else "",
        )
        for row in level["search"]["tried"]
    ]  # fmt: skip
    return table(("candidate", "starts", "tok/s", "predicted", ""), rows, "Everything tried", (0, 4))


def _left_out(level: Document) -> list[str]:
    rows = [(row["label"], f"infeasible: {row['cause']}") for row in level["search"]["infeasible"]]
    rows += [(row["label"], f"not run: {row['reason']}") for row in level["search"]["not_run"]]
    return [table(("candidate", "why"), rows, "Not measured", (0, 1))] if rows else []
