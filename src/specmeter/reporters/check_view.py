"""The check of a pair of models as text: what is fed, what the head was trained on, findings with cause and cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from specmeter.reporters.check_words import check_sentence, states, wiring_word
from specmeter.reporters.inert import inert
from specmeter.reporters.language import VERDICTS, heading, make_table, remark, verdict_line


def check_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report of ``result`` of `specmeter check --json`; ``width`` in columns."""
    yield verdict_line(check_sentence(document), wiring_word(document))
    head, trained = document["head"], document["trained"]
    yield heading("Wiring (H[0] is the embedding output, H[k] the output of decoder layer k-1)")
    yield remark(f"target: {inert(document['target'], 200)}, {document['target_layers']} layers")
    yield remark(f"draft: {inert(document['draft'], 200)}, {inert(head['kind'])} head of {head['states']} states")
    yield remark(f"trained on {states(trained['states'])}: {inert(trained['reason'], 160)}")
    table = make_table(["engine", "feeds", "reads"], left=(0, 1, 2))
    for feed in document["feeds"]:
        name = f"{inert(feed['engine'], 20)} {inert(feed['engine_version'] or '', 20)}"
        fed = f"cannot start: {inert(feed['refusal'], 120)}" if feed["refusal"] else states(feed["states"])
        table.add_row(name, fed, inert(feed["key_read"] or "no ids: default layers", 60))
    yield table
    if document["findings"]:
        yield heading("Findings")
    for found in document["findings"]:
        yield from _finding(found)


def _finding(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    severity = inert(found["severity"], 20)
    text = Text(f"{severity}: ", style=VERDICTS.get(severity, ""))
    yield text.append(f"{inert(found['what'], 300)}  [{inert(found['id'])}]", style="default")
    for label, key in (("why", "cause"), ("cure", "cure"), ("at", "where")):
        if found[key]:
            yield remark(f"  {label + ':':<6}{inert(found[key], 300)}")
