"""The page: sections of a run and of the runs below it, in one file that fetches nothing."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from specmeter import __version__
from specmeter.errors import SpecmeterError
from specmeter.reporters.damage import readable
from specmeter.reporters.html.compare_section import compare_sections
from specmeter.reporters.html.markup import Section, lines, text
from specmeter.reporters.html.profile_section import key_figures, profile_sections
from specmeter.reporters.html.repeat_section import repeat_section
from specmeter.reporters.html.sweep_section import sweep_figures, sweep_sections
from specmeter.reporters.html.tune_section import tune_figures, tune_sections
from specmeter.reporters.html.wiring_section import wiring_sections
from specmeter.reporters.terminal import VIEWS, render_analysis
from specmeter.trace.rundir import Run
from specmeter.trace.whole import write_whole

MOST_CHILDREN = 8
SAVE_TIMEOUT_S = 120.0


def write_page(run: Run, path: Path, wiring: Mapping[str, Any] | None = None) -> Path:
    """Write the page of a run to ``path``, whole or not at all, 0600; gives the path.

    ``wiring`` is the ``result`` of `specmeter check --json`, by default the one that the run saved. Raises
    SpecmeterError where nothing can be shown or the file cannot be written.
    """
    write_whole(path, render_page(run, wiring))
    return path


def save_page(folder: Path) -> Path | None:
    """Write report.html into a finished run directory; None where it could not be made.

    In a process of its own: a fault of the drawing library must not take a finished measurement's command with it.
    """
    if importlib.util.find_spec("vl_convert") is None:
        return None
    path = folder / "report.html"
    command = [sys.executable, "-m", "specmeter", "report", str(folder), "--html", str(path)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, check=True, capture_output=True, timeout=SAVE_TIMEOUT_S, stdin=subprocess.DEVNULL)
        return path
    return None


def render_page(run: Run, wiring: Mapping[str, Any] | None = None) -> str:
    """The page of a run as HTML text. Raises SpecmeterError for a run without an analysis or with damaged tables."""
    runs = _shown(run)
    if not runs:
        raise SpecmeterError(
            f"{run.path} holds no analysis",
            f"Its run is {run.run.get('status', 'of unknown state')}.",
            "Look into its logs/ and record again.",
        )
    profiles = {name: r for name, r in runs.items() if r.analysis.get("kind") == "profile"}
    sections: list[Section] = []
    heads: list[str] = []
    for name, one in runs.items():
        with readable(f"The run {one.path}"):
            head, found = _of_run(name, one, profiles)
        heads.append(head)
        sections += found
    wiring = wiring if wiring is not None else next((one.wiring for one in _all(run) if one.wiring), None)
    if wiring is not None:
        with readable("The wiring"):
            sections += wiring_sections(wiring)
    with readable(f"The run {run.path}"):
        sections.append(repeat_section(run))
    return _page(run, heads, sections)


def _shown(run: Run) -> dict[str, Run]:
    """The run and the ones below it that have an analysis the page knows, by name ("" for itself)."""
    found = {"": run} if _known(run) else {}
    # A tune's document holds its proofs; its children are the runs they come from.
    below = {} if run.analysis.get("kind") == "tune" else run.children
    for name, child in list(below.items())[:MOST_CHILDREN]:
        if _known(child):
            found[name] = child
    return found


def _all(run: Run) -> Iterator[Run]:
    yield run
    yield from list(run.children.values())[:MOST_CHILDREN]


def _known(run: Run) -> bool:
    kind = run.analysis.get("kind")
    return isinstance(kind, str) and kind in VIEWS


def _of_run(name: str, run: Run, profiles: Mapping[str, Run]) -> tuple[str, list[Section]]:
    """The verdict with its key figures, and the sections."""
    document = run.analysis
    prefix = "".join(c if c.isalnum() else "-" for c in name) + "-" if name else ""
    verdict = document["verdict"]
    word = verdict["word"] if verdict["word"] in ("faster", "slower") else "inconclusive"
    kind = document["kind"]
    if kind == "profile":
        figures, sections = key_figures(document), profile_sections(run, prefix)
    elif kind == "sweep":
        figures, sections = sweep_figures(document), sweep_sections(document, profiles, prefix)
    elif kind == "tune":
        figures, sections = tune_figures(document), tune_sections(run, prefix)
    else:
        figures, sections = "", compare_sections(document, prefix) if kind == "compare" else []
        words = f'<pre tabindex="0">{lines(render_analysis(document, 110))}</pre>'
        sections.append(Section("The report as text", f"{prefix}text").add(words))
    return f'<h1 class="{word}">{text(verdict["sentence"])}</h1>\n{figures}', sections


def _page(run: Run, heads: list[str], sections: list[Section]) -> str:
    folder = resources.files("specmeter.reporters.html")
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    # The page runs this one script and nothing else, whatever a name in it contains.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    first, rest = heads[0], [head.replace("<h1", "<h2", 1).replace("</h1>", "</h2>", 1) for head in heads[1:]]
    links = "".join(f'<li><a href="#{s.anchor}">{text(s.title)}</a></li>' for s in sections)
    name = text(run.run.get("id") or run.path.name, 120)
    partial = (
        "" if run.run.get("status") == "complete" else '<p class="note">This run is not complete: it was cut off.</p>'
    )
    body = "\n".join(section.as_html() for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>specmeter: {name}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">To the report</a>
<div class="page">
<header><p>specmeter {text(__version__)}: {name}</p><button id="theme" type="button" hidden>Dark</button></header>
<main id="main">
{first}
{partial}
<nav aria-label="Sections"><ul>{links}</ul></nav>
{"".join(rest)}
{body}
</main>
</div>
<div id="tip" role="status"></div>
<script>{script}</script>
</body>
</html>
"""
