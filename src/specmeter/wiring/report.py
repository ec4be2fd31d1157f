"""The check's report for a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from specmeter.wiring.check import Result
from specmeter.wiring.disagreement import states_text
from specmeter.wiring.feed import Feed, key_text
from specmeter.wiring.findings import Finding, Severity


def write_check(result: Result, out: TextIO | None = None) -> None:
    """Print what is fed, what the head was trained on, and every finding with its cause and cure."""
    stream = sys.stdout if out is None else out
    head, trained = result.pair.head, result.trained
    lines = [
        f"target  {result.pair.target.architecture}, {result.pair.target.layers} layers, hidden size "
        f"{result.pair.target.hidden}",
        f"draft   {head.kind} head, fc takes {head.states or 'an unknown number of'} states; trained on "
        f"{states_text(trained.states)} ({trained.why})",
        "        H[0] is the embedding output, H[k] the output of decoder layer k-1",
        "",
    ]
    for feed in result.feeds:
        lines += _feed(feed)
    lines.append("")
    for part in (result.live, result.numbers):
        if part is not None:
            lines += [*part.as_lines(), ""]
    for finding in result.findings:
        lines += _finding(finding)
    counts = [sum(f.severity is kind for f in result.findings) for kind in Severity]
    words = [f"{n} {kind.value}{'' if n == 1 else 's'}" for n, kind in zip(counts, Severity)]  # noqa: B905 (3.9)
    lines.append(", ".join(words) + ".")
    print("\n".join(lines), file=stream)


def _feed(feed: Feed) -> list[str]:
    fed = f"cannot start: {feed.refusal}" if feed.refusal else f"feeds {states_text(feed.states)}"
    read = f"reads {key_text(feed.key)} = {list(feed.ids or ())}" if feed.key else "reads no ids: default layers"
    default = "" if feed.used else " [not the default]"
    lines = [f"{feed.name}{default}: {fed}; {read}"]
    lines += [f"        {mark}" for mark in feed.evidence]
    if feed.origin == "table":
        lines.append("        from the table of releases")
    return lines


def _finding(finding: Finding) -> list[str]:
    lines = [f"{finding.severity.value}: {finding.what}  [{finding.id}]"]
    if finding.cause:
        lines.append(f"  why:  {finding.cause}")
    if finding.cure:
        lines.append(f"  cure: {finding.cure}")
    if finding.where and finding.severity is not Severity.NOTE:
        lines.append(f"  at:   {finding.where}")
    return lines
