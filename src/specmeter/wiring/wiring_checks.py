"""Checks of the states that engines will feed against the states that the head was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from specmeter.wiring.disagreement import disagreements, states_text, where
from specmeter.wiring.feed import CAPTURE, KEYS, Feed, default_states, key_text, lookup, with_key, without_ids
from specmeter.wiring.findings import Finding, Severity, error, note, warning
from specmeter.wiring.head import EAGLE3, Head
from specmeter.wiring.shape import Shape
from specmeter.wiring.trained import CHANGED_MEANING, Trained

Deriver = Callable[[Mapping[str, object]], list[Feed]]
"""Maps a draft's config to the feeds of one engine; used to ask what another config would do."""


def check_ids(head: Head, target: Shape) -> list[Finding]:
    """Faults of the ids as written, whatever engine reads them."""
    found: list[Finding] = []
    layers = target.layers or 0
    for key in (*KEYS, *CAPTURE):
        value = lookup(head.config, key)
        if value is not None:
            found += _written(key_text(key), value, layers, physical=key in CAPTURE)
    found += _keys_against_each_other(head.config, target.architecture)
    return found


def _written(name: str, value: object, layers: int, physical: bool) -> Iterator[Finding]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        yield error("ids-malformed", f"{name} is {value!r}, not a list of whole numbers")
        return
    outside = [item for item in value if not (0 if physical else -1) <= item <= layers]
    if outside:
        yield error(
            "ids-out-of-range",
            f"{name} names {outside}; the target has layers 0 to {layers - 1}",
            "No layer has such an id: the state is missing, or the engine fails at start.",
            "Correct the ids; for another target's head, use the head of this target.",
        )
    if len(set(value)) != len(value):
        yield error(
            "ids-duplicate",
            f"{name} = {value} repeats an id",
            "Engines capture a layer once, so fc gets fewer states than it takes.",
            "Give each id once.",
        )
    elif value != sorted(value):
        yield error(
            "ids-unsorted",
            f"{name} = {value} is not in ascending order",
            "Engines hand over states in the order of the layers, whatever the order of the ids.",
            "If the head was trained in the order written, permute the column blocks of fc.weight; else sort the ids.",
        )


def _keys_against_each_other(config: Mapping[str, object], architecture: str) -> Iterator[Finding]:
    top, nested = lookup(config, KEYS[0]), lookup(config, KEYS[1])
    if top == nested and architecture.startswith(CHANGED_MEANING):
        return
    if isinstance(top, list) and isinstance(nested, list):
        same = all(isinstance(a, int) and isinstance(b, int) and a == b + 1 for a, b in zip(top, nested))  # noqa: B905 (3.9)
        if not same or len(top) != len(nested):
            yield error(
                "ids-conflict",
                f"{key_text(KEYS[0])} = {top} and {key_text(KEYS[1])} = {nested} mean different states",
                "vLLM reads the first as H[k], SGLang the second as H[j+1]: each engine feeds other layers.",
                "Make the first one more than the second, entry by entry.",
            )


def check_feeds(
    head: Head, target: Shape, feeds: list[Feed], trained: Trained, derivers: Mapping[str, Deriver], chosen: bool
) -> list[Finding]:
    """Findings about what each engine feeds. ``chosen``: one engine was named, so its faults are errors."""
    if head.kind != EAGLE3:
        return []
    found: list[Finding] = []
    for feed in (feed for feed in feeds if feed.used):
        part = [*_start(feed), *_states(head, target, feed, trained, derivers), *_keys(head, target, feed)]
        part += [*_options(head, feed), *_count(head, feed)]
        found += part if chosen else [_softer(finding) for finding in part]
    found += disagreements(feeds)
    if trained.states is None:
        found.append(warning("trained-unknown", "the states that the head was trained on are not known", trained.why))
    return found


def _softer(finding: Finding) -> Finding:
    if finding.severity is not Severity.ERROR:
        return finding
    return Finding(**{**finding.__dict__, "severity": Severity.WARNING})


def _start(feed: Feed) -> Iterator[Finding]:
    if feed.refusal:
        yield error(
            "engine-refuses",
            f"{feed.name} cannot run this pair: {feed.refusal}",
            cure="Use a release that supports it, or another draft.",
            engine=feed.name,
            where=where(feed),
        )
    elif feed.states is None:
        yield warning(
            "convention-unknown",
            f"the source of {feed.name} has a form that is not recognised: what it feeds is not known",
            cure="Run with --probe, or look at the lines named.",
            engine=feed.name,
            where=where(feed),
        )


def _states(
    head: Head, target: Shape, feed: Feed, trained: Trained, derivers: Mapping[str, Deriver]
) -> Iterator[Finding]:
    if feed.states is None or feed.refusal:
        return
    cure = find_cure(head, feed, trained, derivers)
    if feed.lost:
        yield error(
            "ids-never-captured",
            f"{feed.name} never captures {list(feed.lost)}: the draft gets {len(feed.states)} states",
            f"Its loop over {target.layers} layers does not meet these ids.",
            cure,
            feed.name,
            where(feed),
        )
    if 0 in feed.states and not (trained.certain and 0 in (trained.states or ())):
        yield error(
            "embedding-fed",
            f"{feed.name} feeds the embedding output H[0] to the head",
            _why_embedding(feed, trained),
            cure,
            feed.name,
            where(feed),
        )
    if trained.states is not None and feed.states != trained.states and not feed.lost:
        yield _shift(feed, trained, cure)
    if feed.graph_states is not None and feed.graph_states != feed.states:
        yield error(
            "graph-layers",
            f"{feed.name} captures its CUDA graphs with {states_text(feed.graph_states)}, whatever the config says",
            "The ids are set after the graphs are captured: decoding feeds the default layers, prefill the others.",
            "SGLang 0.5.11 or later, or --disable-cuda-graph.",
            feed.name,
            where(feed, -1),
        )


def _why_embedding(feed: Feed, trained: Trained) -> str:
    """The convention explains it where every state is one layer below the trained one; else an id is just wrong."""
    wanted = trained.states
    if wanted is None or wanted == tuple(k + 1 for k in feed.states or ()):
        return (
            "An id that means a layer's output in one engine means its input in another: the first id is one too low."
        )
    return f"The head was trained on {states_text(wanted)}; here an id means the embedding output."


def _shift(feed: Feed, trained: Trained, cure: str) -> Finding:
    assert trained.states is not None and feed.states is not None
    pairs = list(zip(feed.states, trained.states))  # noqa: B905 (3.9)
    steps = {fed - wanted for fed, wanted in pairs}
    cause = "The head drafts from states it never saw: it runs, and accepts less."
    if len(steps) == 1 and len(feed.states) == len(trained.states):
        step = steps.pop()
        side = "before" if step < 0 else "after"
        cause = f"Each state is taken {abs(step)} layer{'s' if abs(step) > 1 else ''} {side} the trained one. {cause}"
    elif feed.key is None:
        cause = f"No key that it reads is set, so it takes its default silently. {cause}"
    make = error if trained.certain or feed.key is None else warning
    return make(
        "wiring-shift",
        f"{feed.name} feeds {states_text(feed.states)}; the head was trained on {states_text(trained.states)}"
        + ("" if trained.certain else f" ({trained.why})"),
        cause,
        cure,
        feed.name,
        where(feed),
    )


def find_cure(head: Head, feed: Feed, trained: Trained, derivers: Mapping[str, Deriver]) -> str:
    """The key and ids with which this reader would feed the trained states, found by asking it; empty if none does."""
    derive = derivers.get(feed.engine + feed.version)
    if trained.states is None or derive is None:
        return ""
    bare = without_ids(head.config)
    if _like(derive(bare), feed, trained.states) is not None:
        return "Remove every layer id from the head's config: the engine's default is right."
    for key in feed.reads:
        for step in (0, -1, 1):
            ids = [k + step for k in trained.states]
            made = _like(derive(with_key(bare, key, ids)), feed, trained.states)
            if made is not None:
                graphs = made.graph_states is not None
                also = " Start it with --disable-cuda-graph too: its graphs keep the default layers." if graphs else ""
                return f"For {feed.name} write {key_text(key)}: {ids} in the head's config.json.{also}"
    return f"{feed.name} cannot be made to feed {states_text(trained.states)} by any key that it reads."


def _like(feeds: list[Feed], like: Feed, states: tuple[int, ...]) -> Feed | None:
    """The feed of the same reader if it feeds these states, at least outside CUDA graphs."""
    same = next((feed for feed in feeds if feed.reader == like.reader), None)
    return same if same is not None and same.states == states and not same.refusal else None


def _keys(head: Head, target: Shape, feed: Feed) -> Iterator[Finding]:
    if feed.key in CAPTURE:
        return  # states, free of any engine's convention
    present = [key for key in KEYS if lookup(head.config, key) is not None]
    ignored = [key for key in present if key != feed.key]
    if feed.key is None and present:
        harmless = feed.states == default_states(target.layers or 0) and all(
            lookup(head.config, key) in _spellings(feed.states) for key in present
        )
        make = note if harmless else error
        yield make(
            "ids-ignored",
            f"{feed.name} ignores {', '.join(key_text(key) for key in present)} and takes its default layers",
            f"It reads {', '.join(key_text(key) for key in feed.reads) or 'no key'} only.",
            "" if harmless else f"Write the ids under {key_text(feed.reads[0])}." if feed.reads else "",
            feed.name,
            where(feed),
        )
    elif feed.key is not None and ignored:
        yield note(
            "key-unread",
            f"{feed.name} reads {key_text(feed.key)}, not {', '.join(key_text(key) for key in ignored)}",
            engine=feed.name,
            where=where(feed),
        )
    elif not present:
        yield note(
            "ids-default",
            f"no layer ids are set: {feed.name} takes its default, {states_text(feed.states)}",
            engine=feed.name,
            where=where(feed),
        )


def _spellings(states: tuple[int, ...] | None) -> list[list[int]]:
    base = list(states or ())
    return [base, [k - 1 for k in base]]


def _options(head: Head, feed: Feed) -> Iterator[Finding]:
    for option in feed.ignored_options:
        if head.option(option) and not (option == "use_aux_norm" and head.option("fc_norm")):
            yield error(
                "option-ignored",
                f"{feed.name} ignores {option}, which the head's config sets",
                "Its head class never mentions the option: the head computes something else than it was trained to.",
                "Use a release that knows it.",
                feed.name,
            )


def _count(head: Head, feed: Feed) -> Iterator[Finding]:
    if head.states is None or feed.refusal:
        return
    expected = _states_of_class(head, feed)
    if expected != head.states:
        yield error(
            "state-count",
            f"the head's fc takes {head.states} states; {feed.name} builds it for {expected}",
            "The engine counts num_aux_hidden_states, else the nested ids, else 3.",
            f"Set num_aux_hidden_states to {head.states}." if feed.fixed_states is None else "Use a newer release.",
            feed.name,
        )
    if feed.states is not None and len(feed.states) != head.states:
        yield error(
            "state-count",
            f"the head's fc takes {head.states} states; {feed.name} feeds {len(feed.states)}",
            "Shapes do not fit: the engine fails at its first draft.",
            f"Name {head.states} layers.",
            feed.name,
            where(feed),
        )


def _states_of_class(head: Head, feed: Feed) -> int:
    stated, nested = head.config.get("num_aux_hidden_states"), lookup(head.config, KEYS[1])
    if feed.fixed_states is not None:
        return feed.fixed_states
    if isinstance(stated, int):
        return stated
    return len(nested) if isinstance(nested, list) and nested else 3
