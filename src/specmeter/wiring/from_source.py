"""What an engine feeds, from its source: which key is read, what the setter makes of the ids, what is captured."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specmeter.errors import SpecmeterError
from specmeter.wiring.capture import captured_states, find_holder
from specmeter.wiring.evaluate import Evaluator
from specmeter.wiring.evaluate_values import Instance, Raised, Undecided, Unknown
from specmeter.wiring.feed import KEYS, Evidence, Feed, lookup, with_key, without_ids
from specmeter.wiring.shape import Shape
from specmeter.wiring.tree import Located, SourceClass, Tree

IDS = "eagle_aux_hidden_state_layer_ids"
HOLDERS = ("layers_to_capture", "aux_hidden_state_layers")
# Options of a head's config that change its arithmetic: a head class that never mentions one ignores it.
HEAD_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")


@dataclass(frozen=True)
class Ids:
    """Layer ids as an engine's reader returns them; ``use_aux`` False means that only the last state is fed."""

    value: tuple[int, ...] | None
    use_aux: bool = True


@dataclass(frozen=True)
class Reader:
    """One code path that reads ids from a draft's config; ``read`` runs it on a config."""

    name: str
    read: Callable[[Mapping[str, object]], Ids]
    evidence: Evidence
    default_method: str = ""
    used: bool = True


def draft_instance(config: Mapping[str, object]) -> Instance:
    """A draft's config as an engine's code sees it."""
    return Instance(dict(config), closed=True)


def evaluator_for(config: Mapping[str, object]) -> Evaluator:
    """An evaluator in which any ``X.hf_config`` is this draft's config."""
    draft = draft_instance(config)
    return Evaluator(lambda name: draft if name in ("hf_config", "hf_text_config") else None)


def as_ids(value: object) -> tuple[int, ...] | None:
    """Layer ids when a value is a list or tuple of whole numbers, else None."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return tuple(value)
    return None


def model_view(tree: Tree, located: Located, target: Shape) -> SourceClass:
    """The target's model class with the fields that setters look at."""
    layers = target.layers or 0
    config = Instance({**target.config, "num_hidden_layers": layers}, closed=True)
    config.fields["text_config"] = config
    fields: dict[str, object] = {"config": config, "start_layer": 0, "end_layer": layers}
    fields["layers"] = [Instance() for _ in range(layers)]
    return SourceClass(tree, located, fields, target.text_architecture)


def apply_setter(
    view: SourceClass, setter: str, arguments: list[object], layers: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...], str, tuple[Evidence, ...]]:
    """Run a setter on a fresh model: (states, lost ids, refusal, evidence)."""
    function = view.method(setter)
    if function is None:
        return None, (), f"the target's class has no {setter}: it does not support EAGLE-3 in this engine", ()
    model = Instance(view=view)
    evidence = [Evidence(f"setter {setter}", view.module_of(function).path, function.lineno)]
    try:
        Evaluator().call(function, [model, *arguments], {})
    except Raised as raised:
        return None, (), f"{setter} raises {raised.kind} {raised.message} at line {raised.line}", tuple(evidence)
    except Undecided:
        return None, (), "", tuple(evidence)
    found = find_holder(model, HOLDERS)
    if found is None:
        return None, (), "", tuple(evidence)
    captured = captured_states(found[0], found[1], layers)
    if captured is None:
        return None, (), "", tuple(evidence)
    evidence.append(Evidence(f"captured {captured.place} the layer", captured.path, captured.line))
    return captured.states, captured.lost, captured.crash, tuple(evidence)


def key_that_is_read(reader: Reader, config: Mapping[str, object]) -> tuple[str, ...] | None:
    """The key whose value the reader returns for this config: each present key is replaced by a mark in turn."""
    for key in KEYS:
        if lookup(config, key) is None:
            continue
        marked = reader.read(with_key(config, key, [7001, 7002])).value
        if marked is not None and any(item in (7001, 7002, 7003) for item in marked):
            return key
    return None


def keys_understood(reader: Reader, config: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Every key that the reader would take ids from if it were the only one."""
    bare = without_ids(config)
    return tuple(key for key in KEYS if reader.read(with_key(bare, key, [7001, 7002])).value is not None)


def make_feed(
    engine: str,
    version: str,
    reader: Reader,
    config: Mapping[str, object],
    states_of: Callable[[Ids], tuple[tuple[int, ...] | None, tuple[int, ...], str, tuple[Evidence, ...]]],
) -> Feed:
    """Read the ids, apply the setter, and put both into a Feed."""
    ids = reader.read(config)
    states, lost, refusal, evidence = states_of(ids)
    return Feed(
        engine=engine,
        version=version,
        reader=reader.name,
        key=key_that_is_read(reader, config) if ids.value is not None else None,
        ids=ids.value,
        states=states,
        origin="source",
        evidence=(reader.evidence, *evidence),
        lost=lost,
        refusal=refusal,
        used=reader.used,
        reads=keys_understood(reader, config),
    )


def head_facts(tree: Tree, path: str, feed: Feed) -> Feed:
    """Add what the engine's head class does with options and with the number of states."""
    module = tree.module(path)
    if module is None:
        return feed
    ignored = tuple(option for option in HEAD_OPTIONS if option not in module.text)
    fixed = None if "num_aux_hidden_states" in module.text else 3
    return replace(feed, ignored_options=ignored, fixed_states=fixed)


def cut_block(path: Path, text: str, needle: str, opening: str) -> tuple[list[ast.stmt], int] | None:
    """The smallest block that starts with a line ``opening`` above the first ``needle``, parsed, and its line."""
    lines = text.splitlines()
    at = next((number for number, line in enumerate(lines) if needle in line), None)
    if at is None:
        return None
    start = next((n for n in range(at, -1, -1) if re.match(rf"\s*{opening}", lines[n])), None)
    if start is None:
        return None
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines):
        line = lines[end]
        inner = len(line) - len(line.lstrip())
        if line.strip() and (inner < indent or (inner == indent and not _continues(line))):
            break
        end += 1
    block = "\n".join(line[indent:] for line in lines[start:end])
    try:
        return ast.parse(block).body, start + 1
    except SyntaxError as fault:
        raise SpecmeterError(f"cannot parse {path} near line {start + 1}", why=str(fault)) from None


def _continues(line: str) -> bool:
    return line.lstrip().startswith(("except", "else", "finally", ")", "#"))


def run_block(body: list[ast.stmt], config: Mapping[str, object]) -> dict[str, object]:
    """Run a block on a draft's config; gives every name and attribute that it assigned."""
    evaluator = evaluator_for(config)
    names: dict[str, object] = {}
    try:
        evaluator.run(body, names)
    except (Raised, Undecided):
        return {}
    return {**names, **evaluator.stored}


def call_function(function: ast.FunctionDef, config: Mapping[str, object]) -> object:
    """Call a function whose arguments are unknown on a draft's config; Unknown when it cannot be decided."""
    arguments: list[object] = [Unknown(argument.arg) for argument in function.args.args]
    try:
        return evaluator_for(config).call(function, arguments, {})
    except (Raised, Undecided):
        return Unknown("undecided")
