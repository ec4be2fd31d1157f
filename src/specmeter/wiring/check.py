"""The whole static check: reads both folders, asks the engines, and collects findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from specmeter.checkpoint.folder import Checkpoint, open_checkpoint
from specmeter.checkpoint.numbers import refuse_layers
from specmeter.errors import SpecmeterError
from specmeter.wiring import embedded_source, sglang_source, vllm_source
from specmeter.wiring.feed import Feed
from specmeter.wiring.findings import Finding, in_order, note, warning
from specmeter.wiring.flag_checks import Settings, check_settings
from specmeter.wiring.head import Head, read_head
from specmeter.wiring.head_checks import check_head
from specmeter.wiring.locate import ENGINES, Engine
from specmeter.wiring.number_checks import check_numbers
from specmeter.wiring.position_checks import check_positions
from specmeter.wiring.shape import Shape, read_shape
from specmeter.wiring.trained import Trained, trained_states
from specmeter.wiring.version_table import NEWEST, OLDEST, from_table, parse_version, table_knows
from specmeter.wiring.vocabulary_checks import check_text, check_vocabulary
from specmeter.wiring.wiring_checks import Deriver, check_feeds, check_ids


class Part(Protocol):
    """What --probe and --scan measured, or what a running server held; made by code that imports more than this."""

    def as_json(self) -> dict[str, object]:
        """The figures for the --json document."""

    def as_lines(self) -> list[str]:
        """The figures for a terminal."""


@dataclass(frozen=True)
class Pair:
    """A target and its draft, opened."""

    target_files: Checkpoint
    target: Shape
    head: Head


@dataclass(frozen=True)
class Result:
    """The outcome of a static check."""

    pair: Pair
    trained: Trained
    feeds: tuple[Feed, ...]
    findings: tuple[Finding, ...]
    numbers: Part | None = None
    live: Part | None = None


def open_pair(target: Path, draft: Path) -> Pair:
    """Open both folders. Raises SpecmeterError for bad input."""
    target_files = open_checkpoint(target, "target")
    shape = read_shape(target_files.config, "target")
    if not shape.layers or not shape.hidden:
        raise SpecmeterError(
            f"the target's config in {target} has no num_hidden_layers or hidden_size",
            next_step="Give the folder of a language model's checkpoint.",
        )
    refuse_layers(shape.layers, "target", target)
    if shape.layers < 1 or shape.hidden < 1:
        raise SpecmeterError(
            f"the target's config in {target} has {shape.layers} layers of width {shape.hidden}",
            "Both must be 1 or more.",
            "Correct num_hidden_layers and hidden_size in its config.json.",
        )
    head = read_head(open_checkpoint(draft, "draft"), shape)
    refuse_layers(head.shape.layers, "draft", draft)
    return Pair(target_files, shape, head)


def check_pair(
    pair: Pair,
    engines: list[Engine],
    settings: Settings,
    served: int | None = None,
    told: tuple[int, ...] | None = None,
) -> Result:
    """Check an opened pair against engines; without any, against the newest releases that the table knows."""
    chosen = bool(engines)
    engines = engines or [Engine(name, NEWEST[name], None) for name in ENGINES]
    head, target = pair.head, pair.target
    layers = target.layers or 0
    trained = trained_states(head.config, head.shape.outer, layers, target.architecture, told)
    findings = [*_remote_code(pair), *_target(pair), *check_head(head, target), *check_vocabulary(head, target)]
    findings += check_numbers(head.config, target.config)
    findings += check_text(head.checkpoint, pair.target_files)
    findings += check_positions(head, target, served)
    findings += check_settings(head, settings, tuple(dict.fromkeys(engine.name for engine in engines)))
    findings += check_ids(head, target)
    feeds: list[Feed] = []
    derivers: dict[str, Deriver] = {}
    for engine in engines:
        deriver = partial(derive, engine, target)
        derivers[engine.name + engine.version] = deriver
        found = deriver(head.config)
        findings += _origin(engine, found, target, head.config)
        feeds += found
    findings += check_feeds(head, target, feeds, trained, derivers, chosen)
    return Result(pair, trained, tuple(feeds), tuple(in_order(findings)))


def derive(engine: Engine, target: Shape, config: Mapping[str, object]) -> list[Feed]:
    """What an engine feeds: from its source when there is one, else from the table by version."""
    if engine.name == embedded_source.NAME:
        return embedded_source.derive(engine.version, target, config)
    if engine.tree is not None:
        if engine.name == "sglang":
            return sglang_source.derive(engine.tree, engine.version, target, config)
        return vllm_source.derive(engine.tree, engine.version, target, config, engine.has_triton)
    if not engine.version:
        raise SpecmeterError(
            f"neither the source nor the version of {engine.name} is known",
            next_step=f"--engine {engine.name}==VERSION, or --python EXE, or --path DIR.",
        )
    return from_table(engine.name, engine.version, target, config, engine.has_triton)


def _origin(engine: Engine, feeds: list[Feed], target: Shape, config: Mapping[str, object]) -> list[Finding]:
    """Says that the table was used, or that source and table do not agree."""
    name = f"{engine.name} {engine.version}".strip()
    if engine.name == embedded_source.NAME:
        return []
    if engine.tree is None:
        found = [
            note("from-table", f"{name}: answers come from the table of releases, not from its source", engine=name)
        ]
        if not table_knows(engine.name, target.architecture):
            found.append(
                warning(
                    "table-class",
                    f"the table of {engine.name} releases does not cover the target class {target.architecture}",
                    "What is said of it is what most classes do; whether it supports EAGLE-3 at all is not known.",
                    "Give the engine's source: --python EXE or --path DIR.",
                    engine=name,
                )
            )
        if parse_version(engine.version) > parse_version(NEWEST[engine.name]):
            found.append(
                warning("table-too-old", f"{name} is newer than the table, which ends at {NEWEST[engine.name]}")
            )
        if parse_version(engine.version) < parse_version(OLDEST[engine.name]):
            found.append(
                warning(
                    "before-table",
                    f"{name} is older than the table, which reaches back to {OLDEST[engine.name]}",
                    "What is said of it is what the oldest releases in the table do; it may not run EAGLE-3 at all.",
                    "Give the engine's source: --python EXE or --path DIR.",
                    engine=name,
                )
            )
        return found
    if not feeds:
        return [
            warning("convention-unknown", f"the folder of {name} has none of the files that wire a draft", engine=name)
        ]
    if not engine.version or not engine.version[:1].isdigit():
        return []
    table = {feed.reader: feed for feed in from_table(engine.name, engine.version, target, config, engine.has_triton)}
    differing = [
        feed
        for feed in feeds
        if feed.states is not None and feed.reader in table and table[feed.reader].states not in (None, feed.states)
    ]
    return [
        warning(
            "table-vs-source",
            f"{feed.name}: its source feeds {list(feed.states or ())}, the release would feed "
            f"{list(table[feed.reader].states or ())}",
            "The source has been changed, or its version is not the one it states. The source counts.",
            engine=feed.name,
            where=str(feed.evidence[-1]) if feed.evidence else "",
        )
        for feed in differing
    ]


def _remote_code(pair: Pair) -> list[Finding]:
    found = []
    for role, config in (("target", pair.target_files.config), ("draft", pair.head.checkpoint.config)):
        if config.get("auto_map") or config.get("trust_remote_code"):
            # Targets are published with code that engines do not need; a head with code of its own is unusual.
            make = warning if role == "draft" else note
            found.append(
                make(
                    "remote-code",
                    f"the {role}'s config asks for code of its own (auto_map or trust_remote_code)",
                    "Nothing of it was run here; an engine started with --trust-remote-code would run it.",
                    "Read that code, or leave the flag out: engines have their own classes.",
                )
            )
    return found


def _target(pair: Pair) -> list[Finding]:
    if pair.target_files.missing:
        names = ", ".join(pair.target_files.missing[:4])
        return [warning("target-tensors", f"the target's index lists tensors that no shard holds: {names}")]
    embed = next((t for n, t in pair.target_files.tensors.items() if n.endswith("embed_tokens.weight")), None)
    if embed is not None and embed.shape != (pair.target.vocab, pair.target.hidden):
        return [
            warning(
                "target-tensors",
                f"the target's {embed.name} is {list(embed.shape)}, its config says "
                f"{[pair.target.vocab, pair.target.hidden]}",
            )
        ]
    return []
