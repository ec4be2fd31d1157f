"""vLLM: what it feeds, from its source. Both model runners are read, since they read different keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import partial
from typing import Optional

from specmeter.wiring.evaluate import Evaluator
from specmeter.wiring.evaluate_values import Instance, Raised, Undecided
from specmeter.wiring.feed import Evidence, Feed
from specmeter.wiring.from_source import (
    IDS,
    Ids,
    Reader,
    apply_setter,
    as_ids,
    call_function,
    cut_block,
    head_facts,
    make_feed,
    model_view,
)
from specmeter.wiring.shape import Shape
from specmeter.wiring.tree import Located, SourceClass, Tree

SETTER = "set_aux_hidden_state_layers"
DEFAULTS = ("get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")
_RUNNER_V1 = "v1/worker/gpu_model_runner.py"
# Evaluated where it is loaded, on a Python of 3.9 too.
_Answer = tuple[Optional[tuple[int, ...]], tuple[int, ...], str, tuple[Evidence, ...]]  # noqa: UP045


def derive(
    tree: Tree, version: str, target: Shape, config: Mapping[str, object], has_triton: bool = True
) -> list[Feed]:
    """What this vLLM feeds for the pair: one entry a model runner, the one that it uses by default marked ``used``."""
    readers = _readers(tree, target.architecture, has_triton)
    if not readers:
        return []
    located = model_class(tree, target.architecture)
    feeds = []
    for reader in readers:
        if located is None:
            why = f"this vLLM has no model class {target.architecture}"
            feeds.append(
                Feed("vllm", version, reader.name, None, None, None, "source", (reader.evidence,), refusal=why)
            )
            continue
        view = model_view(tree, located, target)
        feed = make_feed("vllm", version, reader, config, partial(_states, view, reader, target))
        feeds.append(head_facts(tree, "model_executor/models/llama_eagle3.py", feed))
    return feeds


def _states(view: SourceClass, reader: Reader, target: Shape, ids: Ids) -> _Answer:
    layers = target.layers or 0
    if not any(part.node.name == "SupportsEagle3" for part in view.lineage):
        return None, (), f"{target.architecture} does not support EAGLE-3 in this vLLM (no SupportsEagle3)", ()
    if ids.value:
        return apply_setter(view, SETTER, [ids.value], layers)
    default = view.method(reader.default_method)
    if default is None:
        return None, (), f"the target's class has no {reader.default_method}", ()
    try:
        chosen = Evaluator().call(default, [Instance(view=view)], {})
    except (Raised, Undecided):
        return None, (), "", ()
    states, lost, refusal, evidence = apply_setter(view, SETTER, [chosen], layers)
    mark = Evidence(f"default from {reader.default_method}", view.module_of(default).path, default.lineno)
    return states, lost, refusal, (mark, *evidence)


def model_class(tree: Tree, architecture: str) -> Located | None:
    """The class that the registry names for an architecture."""
    registry = tree.module("model_executor/models/registry.py")
    if registry is not None:
        entry = re.search(rf'"{re.escape(architecture)}": \(\s*"([\w.]+)",\s*"(\w+)",?\s*\)', registry.text)
        if entry is not None:
            module, name = entry.groups()
            dotted = module if "." in module else f"model_executor.models.{module}"
            found = tree.class_at(dotted, name)
            if found is not None:
                return found
    return tree.class_in("model_executor/models", architecture)


def _readers(tree: Tree, architecture: str, has_triton: bool) -> list[Reader]:
    first, second = _runner_v1(tree), _runner_v2(tree)
    if first is None or second is None:
        return [reader for reader in (first, second) if reader is not None]
    second_used = has_triton and _runner_v2_is_default(tree, architecture)
    return [_marked(first, not second_used), _marked(second, second_used)]


def _marked(reader: Reader, used: bool) -> Reader:
    return Reader(reader.name, reader.read, reader.evidence, reader.default_method, used)


def _runner_v2_is_default(tree: Tree, architecture: str) -> bool:
    """Whether runner V2 is the default: first for a list of architectures, later for all but unsupported features."""
    module = tree.module("config/vllm.py")
    if module is None or "_get_v2_model_runner_unsupported_features" not in module.text:
        return False
    chosen = re.search(r"^DEFAULT_V2_MODEL_RUNNER_ARCH\w* = [^}]*\}", module.text, re.MULTILINE)
    return chosen is None or f'"{architecture}"' in chosen.group()


def _runner_v1(tree: Tree) -> Reader | None:
    module = tree.module(_RUNNER_V1)
    if module is None:
        return None
    default = next((name for name in DEFAULTS if f"self.model.{name}" in module.text), "")
    block = cut_block(module.path, module.text, "def _get_eagle3_aux_layers_from_config", "def ")
    if block is None:
        if not default:
            return None
        line = module.text[: module.text.index(default)].count("\n") + 1
        mark = Evidence("layers taken from the model, never from the draft's config", module.path, line)
        return Reader("model runner V1", lambda config: Ids(None), mark, default)
    return _reader("model runner V1", block, Evidence("ids read", module.path, block[1]), default)


def _runner_v2(tree: Tree) -> Reader | None:
    for path in tree.find("v1/worker/gpu/spec_decode", "**/*.py"):
        module = tree.module(str(path.relative_to(tree.package)))
        if module is None or "def get_eagle3_aux_layers_from_config" not in module.text:
            continue
        default = next((name for name in DEFAULTS if f".{name}" in module.text), "")
        block = cut_block(path, module.text, "def get_eagle3_aux_layers_from_config", "def ")
        if block is not None:
            return _reader("model runner V2", block, Evidence("ids read", path, block[1]), default)
    return None


def _reader(name: str, block: tuple[list[ast.stmt], int], mark: Evidence, default: str) -> Reader:
    function = block[0][0]
    assert isinstance(function, ast.FunctionDef)
    return Reader(name, lambda config: Ids(as_ids(call_function(function, config))), mark, default)


__all__ = ["IDS", "derive"]
