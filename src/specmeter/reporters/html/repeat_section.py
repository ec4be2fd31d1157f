"""What is needed to run it again: command, server, versions, machine, settings, prompts; secrets masked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from specmeter.reporters.html.markup import Section, details, paragraph, table, text
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.rundir import Run

_OWN = {"schema", "command", "env", "created_ns"}
MOST_POINTS = 400


def repeat_section(run: Run) -> Section:
    """The section; masks once more, so that a run written by anything else leaks nothing either."""
    section = Section("Run it again", "repeat")
    command = run.run.get("command")
    if isinstance(command, list) and command:
        line = shlex.join(mask_command([str(word) for word in command]))
        section.add("<h3>Command</h3>", f'<pre tabindex="0">{text(line, 20_000)}</pre>')
    section.add(table(("fact", "value"), _facts(run), "The run", (0, 1)))
    env = run.run.get("env")
    if isinstance(env, Mapping) and env:
        masked = mask_env({str(k): str(v) for k, v in env.items()})
        listed = table(("variable", "value"), sorted(masked.items()), "Environment, secrets masked", (0, 1))
        section.add(details("Environment", listed))
    elif isinstance(env, Mapping):
        section.add(paragraph("Environment: no variable that a measurement depends on was set."))
    return section.add(*_points(run.plan), *_children(run))


def _facts(run: Run) -> list[tuple[str, str]]:
    made = run.run.get("created_ns")
    rows = []
    if isinstance(made, int) and 0 < made < 2**62:
        when = datetime.fromtimestamp(made / 1e9, timezone.utc)
        rows.append(("recorded", when.strftime("%Y-%m-%d %H:%M:%S UTC")))
    rows += [(key, _said(value)) for key, value in run.run.items() if key not in _OWN]
    plan = run.plan
    if plan:
        rows.append(("engine", f"{plan.get('engine')} {plan.get('engine_version') or ''}"))
        python = plan.get("python")
        if isinstance(python, Mapping):
            rows.append(("server's Python", _said({k: python[k] for k in ("executable", "version") if k in python})))
        rows.append(("recipe", str(plan.get("recipe_sha256") or "-")))
    prompts = run.analysis.get("prompts")
    if prompts:
        rows.append(("prompts", _said(prompts)))
    return rows


def _said(value: Any) -> str:
    """A value in words; a list that is a command line, and text that holds one, masked."""
    if isinstance(value, Mapping):
        masked = mask_env({str(k): _said(v) for k, v in value.items()})
        return ", ".join(f"{k} {v}" for k, v in masked.items())
    if isinstance(value, (list, tuple)):
        return shlex.join(mask_command([str(v) for v in value]))
    return mask_command([value])[0] if isinstance(value, str) else json.dumps(value, default=str)


def _points(plan: Mapping[str, Any]) -> list[str]:
    points = [p for p in plan.get("points", ()) if isinstance(p, Mapping)] if plan else []
    if not points:
        return []
    rows = [
        (p.get("name", "?"), p.get("role", ""), f"{p.get('module', '')}:{p.get('line', '')}", p.get("qualname", ""),
         p.get("text", ""))
        for p in points[:MOST_POINTS]
    ]  # fmt: skip
    columns = ("point", "role", "module and line", "function", "text")
    return [details(f"Measured points ({len(points)})", table(columns, rows, "The plan", (0, 1, 2, 3, 4)))]


def _children(run: Run) -> list[str]:
    rows = [
        (name, child.run.get("status", "-"), (child.analysis.get("verdict") or {}).get("sentence", "-"))
        for name, child in run.children.items()
    ]
    return [table(("run", "status", "verdict"), rows, "Runs below this one", (0, 1, 2))] if rows else []
