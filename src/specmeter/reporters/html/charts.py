"""Charts as SVG text, by Vega-Lite through vl-convert: nothing is fetched, and the page needs no plotting script.

Colours are CSS variables of the page, so one drawing serves dark and light. A mark's ``label`` field is its accessible
name and what the page shows on pointer and keyboard focus.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specmeter.errors import needs_extra
from specmeter.reporters.inert import inert

WIDTH = 560
Rows = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]

PHASE_ORDER = ("draft", "verify", "accept", "extend", "kv", "schedule", "wait", "other", "glue", "unattributed")
_VL_VERSION = "5.20"
_count = itertools.count(1)

_TEXT = {"labelColor": "var(--fg)", "titleColor": "var(--fg)", "labelFontSize": 12, "titleFontSize": 12}
_CONFIG: Spec = {
    "background": None,
    "padding": {"left": 4, "right": 16, "top": 4, "bottom": 4},
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_TEXT, "gridColor": "var(--grid)", "domainColor": "var(--line)", "tickColor": "var(--line)",
        "titleFontWeight": "normal", "labelLimit": 150, "tickCount": 6,
    },
    "legend": {
        **_TEXT, "orient": "bottom", "title": None, "columns": 5, "symbolType": "square", "labelLimit": 150,
        "columnPadding": 28,
    },
    "header": _TEXT,
    "title": {"color": "var(--fg)", "fontSize": 12, "fontWeight": "normal", "anchor": "start", "limit": 180},
    "text": {"color": "var(--fg)", "fontSize": 12},
    "rule": {"color": "var(--fg)"},
}  # fmt: skip


def draw(spec: Spec, values: Rows = ()) -> str:
    """The SVG of a Vega-Lite spec over ``values`` (each text in them made inert).

    Raises SpecmeterError (exit 5) where vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise needs_extra("The page's charts need vl-convert.", "It is not installed.", "html") from error
    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json", "config": _CONFIG, "width": WIDTH,
        "data": {"values": list(values)}, **spec,
    }  # fmt: skip
    svg: str = vl_convert.vegalite_to_svg(_inert(whole), vl_version=_VL_VERSION, allowed_base_urls=[])
    return _embedded(svg)


def _inert(value: Any) -> Any:
    """The same value with every text in it made inert; the drawing library ends the process at a control character."""
    if isinstance(value, str):
        return inert(value, 200)
    if isinstance(value, Mapping):
        return {key: _inert(item) for key, item in value.items()}
    return [_inert(item) for item in value] if isinstance(value, (list, tuple)) else value


def _embedded(svg: str) -> str:
    """The drawing for use inside a page: ids that are its own, hidden from the tree where it repeats the table."""
    prefix = f"c{next(_count)}-"
    svg = re.sub(r'\bid="([\w-]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r"url\(#([\w-]+)\)", rf"url(#{prefix}\1)", svg)
    svg = re.sub(r' role="graphics-(?:object|symbol)"| aria-roledescription="[^"]*"', "", svg)
    # Groups and axes carry generated names; only marks are read out and shown.
    svg = re.sub(r'(<g\b[^>]*?) aria-label="[^"]*"', r"\1", svg)
    return re.sub(r'(<(?:path|rect|line|text)\b[^>]*?) aria-label="', r'\1 role="img" class="mark" aria-label="', svg)


def axis(title: str | None, **more: Any) -> Spec:
    """An axis with a title."""
    return {"title": title, **more}


def names_axis(title: str | None, names: Iterable[object]) -> Spec:
    """A left axis of names, as wide as they need in a wide font: the page's fonts are not known when it is drawn."""
    longest = max((len(str(name)) for name in names), default=0)
    return {"title": title, "minExtent": min(10 + 8 * longest, 160)}


def label() -> Spec:
    """The channel that makes a mark's accessible name from its row's ``label``."""
    return {"field": "label", "type": "nominal"}


def phase_colour(names: Sequence[str], legend: bool = True) -> Spec:
    """Colours for phases: the page's own variable of each."""
    domain = [name for name in PHASE_ORDER if name in names]
    scale = {"domain": domain, "range": [f"var(--p-{name})" for name in domain]}
    return {"field": "phase", "type": "nominal", "scale": scale, "legend": {} if legend else None}


def series_colour(names: Sequence[str], legend: bool = True) -> Spec:
    """Colours for a few named series, in the order given."""
    scale = {"domain": list(names), "range": [f"var(--s{i % 8})" for i in range(len(names))]}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": {} if legend else None}
