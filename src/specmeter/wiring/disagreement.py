"""Where engines, or code paths of one engine, feed different states for the same files."""

from __future__ import annotations

from collections.abc import Iterator

from specmeter.wiring.feed import Feed
from specmeter.wiring.findings import Finding, warning


def states_text(states: tuple[int, ...] | None) -> str:
    """``H[2], H[15], H[27]``."""
    return "unknown" if states is None else ", ".join(f"H[{k}]" for k in states) or "nothing"


def where(feed: Feed, index: int = 0) -> str:
    """File and line of one piece of a feed's evidence."""
    if not feed.evidence:
        return "" if feed.origin == "source" else "table by version"
    mark = feed.evidence[index]
    return f"{mark.path}:{mark.line}"


def disagreements(feeds: list[Feed]) -> Iterator[Finding]:
    """Findings where engines, or the two runners of one engine, feed different states."""
    known = [feed for feed in feeds if feed.states is not None and not feed.refusal]
    used = [feed for feed in known if feed.used]
    if len({feed.states for feed in used}) > 1:
        yield warning(
            "engines-disagree",
            "the engines feed different states: " + "; ".join(f"{f.name}: {states_text(f.states)}" for f in used),
            "They read different keys, or mean different states by the same ids.",
            "Choose the engine with --engine to get the ids for it.",
        )
    for feed in known:
        other = next((u for u in used if u.engine == feed.engine and u.version == feed.version), None)
        if other is not None and not feed.used and feed.states != other.states:
            yield warning(
                "runners-disagree",
                f"{feed.engine} feeds {states_text(feed.states)} with its {feed.reader} and "
                f"{states_text(other.states)} with its {other.reader}, which is its default here",
                "The two runners read different keys of the draft's config.",
                "Set the ids on top (eagle_aux_hidden_state_layer_ids): both read them.",
                feed.engine,
                where(feed),
            )
