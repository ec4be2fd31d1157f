"""What a running server holds against what its files promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specmeter.wiring.check import Result
from specmeter.wiring.disagreement import states_text
from specmeter.wiring.feed import Feed
from specmeter.wiring.findings import Finding, error, note, warning
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.held import states_of_held
from specmeter.wiring.live import RUNNERS, Seen
from specmeter.wiring.live_shapes import check_shapes, sharding
from specmeter.wiring.locate import Engine


@dataclass(frozen=True)
class Rank:
    """One process, with the states that the ids it holds mean (None: not readable, or a form not recognised)."""

    seen: Seen
    states: tuple[int, ...] | None
    feed: Feed | None

    def as_json(self) -> dict[str, object]:
        """The process as an object of the ``--json`` output."""
        ids, seen = self.seen.get("captured"), self.seen
        return {
            "pid": seen.pid,
            "rank": seen.rank,
            "world": seen.world,
            "runner": RUNNERS.get(seen.runner) or None,
            "captured_ids": None if ids is None else list(ids),
            "states": None if self.states is None else list(self.states),
            "draft_sharded_over": sharding(seen),
            "values": {name: list(numbers) for name, numbers in sorted(seen.values.items())},
            "unread": dict(sorted(seen.unread.items())),
        }


@dataclass(frozen=True)
class Live:
    """What the processes of a link held, and what that means."""

    link: str
    engine: str
    ranks: tuple[Rank, ...]
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, object]:
        """The ``live`` object of the ``--json`` document."""
        return {"link": self.link, "engine": self.engine, "processes": [rank.as_json() for rank in self.ranks]}

    def as_lines(self) -> list[str]:
        """The processes for a terminal."""
        lines = [f"live    link {self.link}, {self.engine}"]
        for rank in self.ranks:
            seen, ids = rank.seen, rank.seen.get("captured")
            runner = f", {RUNNERS[seen.runner]}" if seen.runner in RUNNERS else ""
            held = "captured ids not readable" if ids is None else f"holds {list(ids)}, captures"
            lines.append(f"        {seen.name}{runner}: {held} {states_text(rank.states) if ids is not None else ''}")
            lines += [f"          {text}" for text in _shapes(seen)]
        return lines


def _shapes(seen: Seen) -> Iterator[str]:
    of = sharding(seen)
    heads, total = seen.number("heads"), seen.number("heads_total")
    if heads is not None:
        share = f"{heads} of {total} attention heads" if total is not None else f"{heads} attention heads"
        yield f"draft: {share} here" + ("" if of is None else ", whole" if of == 1 else f", sharded over {of} ranks")
    names = {"fc": "fc", "qkv": "qkv", "lm_head": "lm_head", "d2t": "d2t", "fed": "states fed [rows, width]"}
    shapes = [f"{text} {list(found)}" for name, text in names.items() if (found := seen.get(name)) and found != (0,)]
    inputs, rows = seen.number("fc_inputs"), seen.number("lm_head_rows")
    shapes += [f"fc takes {inputs}"] if inputs is not None else []
    shapes += [f"lm_head holds {rows} rows"] if rows is not None else []
    if shapes:
        yield ", ".join(shapes)


def compare(link: str, engine: Engine, result: Result, seen: Sequence[Seen], settings: Settings) -> Live:
    """Compare every process with the static answer. ``result`` is the check of the same files for that engine."""
    ranks = tuple(_rank(engine, result, one) for one in seen)
    name = f"{engine.name} {engine.version}".strip()
    found: list[Finding] = [*_runner(result, ranks), *_ranks_differ(ranks, name)]
    for rank in _distinct(ranks):
        found += [*_states(rank, result, name), *check_shapes(rank.seen, result, settings, name)]
    return Live(link, name, ranks, tuple(dict.fromkeys(found)))


def _rank(engine: Engine, result: Result, seen: Seen) -> Rank:
    ids = seen.get("captured")
    states = None if ids is None else states_of_held(engine, result.pair.target, ids)
    feeds = [feed for feed in result.feeds if feed.engine == engine.name]
    reader = RUNNERS.get(seen.runner)
    same = [feed for feed in feeds if feed.reader == reader] or [feed for feed in feeds if feed.used]
    return Rank(seen, states, same[0] if same else None)


def _distinct(ranks: Sequence[Rank]) -> list[Rank]:
    """One process for each different thing that is held: eight equal ranks need no finding eight times."""
    return list({(tuple(sorted(rank.seen.values.items())), rank.states): rank for rank in reversed(ranks)}.values())


def _states(rank: Rank, result: Result, engine: str) -> Iterator[Finding]:
    ids, where, trained = rank.seen.get("captured"), rank.seen.name, result.trained
    if ids is None or rank.states is None:
        why = rank.seen.unread.get("captured", "") if ids is None else f"it holds {list(ids)}, of unknown convention"
        yield warning("live-unread", f"the captured layers of {where} could not be told", why, engine=engine)
        return
    promised = rank.feed.states if rank.feed is not None and not rank.feed.refusal else None
    if promised is not None and rank.states != promised:
        yield error(
            "live-differs",
            f"{where} captures {states_text(rank.states)}; by these files it would be {states_text(promised)}",
            "It was started with other files or flags, or its source has been changed since.",
            "Compare --draft with the server's command line; restart it, or check the folder that it was given.",
            engine,
        )
    if trained.states is not None and rank.states != trained.states:
        embedding = 0 in rank.states and 0 not in trained.states
        make = error if trained.certain or embedding else warning
        yield make(
            "live-embedding-fed" if embedding else "live-shift",
            f"{where} feeds {states_text(rank.states)} to the head, which was trained on {states_text(trained.states)}"
            + ("" if trained.certain else f" ({trained.why})"),
            "This is what the running process does: the head drafts from states it never saw, and accepts less.",
            "Correct the ids in the head's config (see the static findings) and restart the server.",
            engine,
        )
    elif promised is None or rank.states == promised:
        yield note("live", f"{where} captures {states_text(rank.states)}, as its files promise", engine=engine)


def _runner(result: Result, ranks: Sequence[Rank]) -> Iterator[Finding]:
    for rank in ranks[:1]:
        if rank.feed is not None and not rank.feed.used:
            used = next((feed.reader for feed in result.feeds if feed.engine == rank.feed.engine and feed.used), "")
            yield warning(
                "live-runner",
                f"the server runs {rank.feed.reader}, not {used or 'the one'} that is this engine's default here",
                "An environment variable or a flag chose it; it reads other keys of the head's config.",
                "The findings named live-* hold for the runner that runs.",
                rank.feed.name,
            )


def _ranks_differ(ranks: Sequence[Rank], engine: str) -> Iterator[Finding]:
    if len({rank.seen.get("captured") for rank in ranks}) > 1:
        held = "; ".join(f"{rank.seen.name}: {list(rank.seen.get('captured') or ())}" for rank in ranks)
        yield error(
            "live-ranks-differ",
            f"ranks hold different layers: {held}",
            "They were started from different files.",
            "Give every rank the same head.",
            engine,
        )
