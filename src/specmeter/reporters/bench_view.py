"""The report of ``specmeter bench``: speed as a client sees it, at each level of load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from specmeter.reporters.inert import inert
from specmeter.reporters.language import NARROW, heading, make_table, remark, verdict_line
from specmeter.reporters.numbers import number

_ROWS = (
    ("ttft_ms", "time to first token, ms"),
    ("token_ms", "time per output token, ms"),
    ("gap_ms", "between arrivals, ms"),
    ("user_tok_s", "tok/s per user, decode only"),
)
_COLUMNS = ("mean", "p50", "p90", "p99")


def bench_parts(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The parts of the report, in order; ``width`` in columns."""
    yield verdict_line(document["verdict"]["sentence"], document["verdict"]["word"])
    for level in document["levels"]:
        yield heading(f"{_load(level)}: {number(level['total_tok_s'], 1)} tok/s in total")
        table = make_table(["", *(_COLUMNS if width >= NARROW else _COLUMNS[:2])])
        for key, title in _ROWS:
            cells = [number(level[key][name], 2) for name in _COLUMNS]
            table.add_row(title, *(cells if width >= NARROW else cells[:2]))
        yield table
        length = level["accept_length_tokens"]
        if length is not None:
            yield remark(f"Accept length {length:.3f} tokens a cycle (the engine's counters)")
        yield from _acceptance(level)
        cached, late = level.get("cached_tokens"), level.get("late_ms", {}).get("p99")
        if cached:
            share = 100 * cached / max(level["prompt_tokens"], 1)
            yield remark(f"{share:.0f} % of the prompt tokens came from the server's prefix cache: no cold first token")
        if late is not None:
            yield remark(f"Requests were sent at most {max(late, 0):.1f} ms later than due (p99)")
        failed = f", {level['failed']} failed" if level["failed"] else ""
        yield remark(f"{level['requests']} requests{failed}; the generator used {_share(level)} of a core")
        yield from _left_out(level)
    yield heading("How sure")
    tokens, prompts = document["max_tokens"], inert(document["prompts"], 80)
    yield remark(
        f"Answers of at most {tokens} tokens, {prompts} prompts, one server start: starts differ by up to 6 %."
    )


def bench_sentence(levels: Sequence[Mapping[str, Any]]) -> str:
    """The result in plain words: the level with the most tokens a second, and what a user sees there."""
    most = max(levels, key=lambda level: level["total_tok_s"] or 0.0)
    first, each = most["ttft_ms"]["p50"], most["token_ms"]["p50"]
    seen = f"the first token comes after {first:.0f} ms" if first is not None else "no first token was timed"
    seen += f", then one every {each:.1f} ms (medians)" if each is not None else ""
    where = f" at {_load(most)}" if len(levels) == 1 else f" at {_load(most)}, the most of {len(levels)} levels"
    return f"{number(most['total_tok_s'], 1)} tok/s{where}: {seen}."


def _acceptance(level: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Acceptance by position, kind and context, where the server tells it."""
    if level.get("accept_by_position"):
        shares = " ".join(f"{share:.2f}" for share in level["accept_by_position"])
        yield remark(f"Accepted at position 1, 2, ...: {shares} of the cycles")
    for key, what in (("accept_by_kind", "kind"), ("accept_by_context", "context, tokens")):
        found = level.get(key) or {}
        if len(found) > 1:
            listed = ", ".join(f"{inert(name, 40)} {length:.2f}" for name, length in list(found.items())[:12])
            yield remark(f"Accept length by {what}: {listed}")


def _left_out(level: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What a ramp left out of the figures above."""
    left = level.get("left_out")
    if not left:
        return
    kept = level["requests"] - left["ramp"] - left["ramp_down"]
    yield remark(
        f"Left out: {left['ramp']} requests begun in the ramp of {level['ramp_s']:g} s, {left['ramp_down']} under way "
        f"when the first stream had run out of work; {kept} count"
    )
    if not kept:
        yield remark("No request ran whole with all streams: give a shorter --ramp or more --requests")


def _load(level: Mapping[str, Any]) -> str:
    if level["rate_per_s"]:
        return f"{level['rate_per_s']:g} requests a second"
    return f"{level['concurrency']} request{'s' if level['concurrency'] != 1 else ''} at once"


def _share(level: Mapping[str, Any]) -> str:
    return f"{100 * level['generator_core_share']:.0f} %"
