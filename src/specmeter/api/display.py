"""What a notebook shows of a run and of a diff: small, self-contained, every text from outside inert and escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from specmeter.reporters.html.markup import text
from specmeter.reporters.numbers import accept_range, plus_minus
from specmeter.trace.rundir import Run

_NAMES = {
    "break_even_tokens": "break-even",
    "expected_speedup": "expected speed-up",
    "measured_speedup": "measured speed-up",
}


def run_html(run: Run) -> str:
    """Verdict, key figures and phase table of a run."""
    analysis = run.analysis
    head = f"<b>{text((analysis.get('verdict') or {}).get('sentence') or 'No analysis.')}</b>"
    status = run.run.get("status")
    about = f"<div>{text(run.path)} · {text(analysis.get('kind') or 'no analysis')} · {text(status)}</div>"
    return f"<div>{head}{about}{_profile(analysis)}{_sweep(analysis)}</div>"


def diff_html(document: Mapping[str, Any]) -> str:
    """Sentence, phases with intervals, and what was set differently."""
    rows = [
        (
            row["name"],
            f"{row['a_ms']:.3f}",
            f"{row['b_ms']:.3f}",
            _interval(row["difference_ms"], -math.inf),
            row["word"],
        )
        for row in (document["cycle"], *document["phases"])
    ]
    set_ = [
        (c["name"], "-" if c["a"] is None else c["a"], "-" if c["b"] is None else c["b"]) for c in document["changes"]
    ]
    return (
        f"<div><b>{text(document['sentence'])}</b>"
        + _table(("a cycle", "A ms", "B ms", "B - A ms [95 %]", ""), rows)
        + (_table(("set differently", "A", "B"), set_) if set_ else "")
        + "</div>"
    )


def colours() -> str:
    """The report's colour variables (light) as a style attribute, for a chart outside of the page."""
    style = files("specmeter.reporters.html").joinpath("style.css").read_text(encoding="utf-8")
    first = style.partition(":root {")[2].partition("}")[0]
    found = re.findall(r"(--[\w-]+:\s*#[0-9a-f]+)", first)
    return "; ".join([*found, "background: var(--bg)", "color: var(--fg)"])


def _profile(analysis: Mapping[str, Any]) -> str:
    if analysis.get("kind") != "profile":
        return ""
    accepted = analysis["acceptance"]
    facts = [("cycle ms", _interval(analysis["cycle"]["mean_ms"]))]
    facts.append(("accept length", _interval(accepted["length_tokens"], *accept_range(len(accepted["positions"])))))
    for name in ("break_even_tokens", "expected_speedup", "measured_speedup"):
        facts.append((_NAMES[name], _interval(analysis[name])))
    phases = [(p["name"], f"{p['ms']:.3f}", f"{p['percent']:.1f} %", f"{p['calls']:.1f}") for p in analysis["phases"]]
    return _table(("", "[95 %]"), facts) + _table(("phase", "ms", "share", "calls"), phases)


def _sweep(analysis: Mapping[str, Any]) -> str:
    if analysis.get("kind") != "sweep":
        return ""
    rows = [(a["setting"], _interval(a["tokens_per_s"]), _interval(a["ratio"]), a["verdict"]) for a in analysis["arms"]]
    return _table(("setting", "tok/s [95 %]", "x baseline [95 %]", "verdict"), rows)


def _interval(value: Mapping[str, Any] | None, floor: float = 0.0, most: float = math.inf) -> str:
    if not value or value["point"] is None:
        return "not measured"
    return f"{value['point']:.3f}{plus_minus(value, 3, floor, most)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{text(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
