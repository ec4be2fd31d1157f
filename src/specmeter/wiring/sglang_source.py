"""SGLang: what it feeds, from its source."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Optional

from specmeter.wiring.feed import Evidence, Feed
from specmeter.wiring.from_source import (
    IDS,
    Ids,
    Reader,
    apply_setter,
    as_ids,
    cut_block,
    head_facts,
    make_feed,
    model_view,
    run_block,
)
from specmeter.wiring.shape import Shape
from specmeter.wiring.tree import Tree

SETTER = "set_eagle3_layers_to_capture"
_READERS = (
    "srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
    "srt/model_executor/model_runner.py",
)
_GRAPHS = ("srt/model_executor/cuda_graph_runner.py",)
# Evaluated where it is loaded, on a Python of 3.9 too.
_Answer = tuple[Optional[tuple[int, ...]], tuple[int, ...], str, tuple[Evidence, ...]]  # noqa: UP045


def derive(tree: Tree, version: str, target: Shape, config: Mapping[str, object]) -> list[Feed]:
    """What this SGLang feeds for the pair; one entry, or none when the tree is not an SGLang."""
    reader = _reader(tree)
    located = tree.class_in("srt/models", target.architecture)
    if reader is None:
        return []
    if located is None:
        why = f"this SGLang has no model class {target.architecture}"
        return [Feed("sglang", version, "", None, None, None, "source", (reader.evidence,), refusal=why)]
    view = model_view(tree, located, target)
    layers = target.layers or 0
    takes_ids = _takes_ids(view.method(SETTER))

    def states_of(ids: Ids) -> _Answer:
        if not ids.use_aux:
            return (layers,), (), "", ()
        arguments: list[object] = []
        if takes_ids:
            arguments = [None if ids.value is None else list(ids.value)]
        return apply_setter(view, SETTER, arguments, layers)

    feed = make_feed("sglang", version, reader, config, states_of)
    if not takes_ids:
        feed = replace(feed, key=None, ids=None, reads=())
    feed = head_facts(tree, "srt/models/llama_eagle3.py", feed)
    return [_graph_order(tree, feed, states_of(Ids(None)))]


def _takes_ids(setter: ast.FunctionDef | None) -> bool:
    return setter is None or len(setter.args.args) > 1


def _reader(tree: Tree) -> Reader | None:
    """The ``try`` statement that takes the ids out of the draft's config; without one the ids are not configurable."""
    for path in _READERS:
        module = tree.module(path)
        if module is None:
            continue
        block = cut_block(module.path, module.text, f'"{IDS}"', "try:")
        if block is not None:
            body, line = block

            def read(config: Mapping[str, object], body: list[ast.stmt] = body) -> Ids:
                found = run_block(body, config)
                use_aux = found.get("eagle_use_aux_hidden_state", True)
                return Ids(as_ids(found.get(IDS)), use_aux is not False)

            return Reader("", read, Evidence("ids read", module.path, line))
        if SETTER in module.text:
            line = module.text[: module.text.index(SETTER)].count("\n") + 1
            return Reader("", lambda config: Ids(None), Evidence("setter called without ids", module.path, line))
    return None


def _graph_order(tree: Tree, feed: Feed, default: _Answer) -> Feed:
    """Some releases call the setter without ids just before graphs are captured: graphs keep the default layers."""
    for path in _GRAPHS:
        module = tree.module(path)
        if module is None or SETTER not in module.text:
            continue
        for number, line in enumerate(module.text.splitlines(), 1):
            if SETTER in line and _calls_without_arguments(line) and default[0] != feed.states:
                mark = Evidence("graphs captured after a setter call without ids", module.path, number)
                return replace(feed, graph_states=default[0], evidence=(*feed.evidence, mark))
    return feed


def _calls_without_arguments(line: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(line.strip())))
    except SyntaxError:
        return False
    calls = [
        n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == SETTER
    ]
    return any(not call.args and not call.keywords for call in calls)
