"""Which states a target model's ``forward`` keeps for the draft, read off its loop over the layers.

The loop tests each layer index (or index + 1) against the chosen ids and keeps the residual stream before or after the
layer's call, or hands the layer a list that the layer fills before its attention. All three are recognised by where
the test stands relative to the layer's call; the test itself is evaluated for every index.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specmeter.wiring.evaluate import Evaluator
from specmeter.wiring.evaluate_values import Instance, Raised, Undecided, Unknown
from specmeter.wiring.tree import SourceClass

_LAYER_MARK = "_is_layer_to_capture"


@dataclass(frozen=True)
class Site:
    """One test of an id. ``place``: before, after or inside the layer's call, or ahead of or past the whole loop."""

    place: str
    index: ast.expr
    loop: ast.For | None
    line: int
    residual_required: bool


@dataclass(frozen=True)
class Captured:
    """The states that ``forward`` keeps, in its order.

    ``states`` are k of H[k]; ``lost`` the ids that no test ever meets; ``crash`` is the reason why the first forward
    would fail, or empty.
    """

    states: tuple[int, ...]
    lost: tuple[int, ...]
    path: Path
    line: int
    place: str
    crash: str = ""


def find_holder(holder: Instance, attributes: tuple[str, ...]) -> tuple[Instance, str] | None:
    """The object below ``holder`` on which the setter has put the ids, and the attribute's name."""
    waiting = [holder]
    while waiting:
        current = waiting.pop(0)
        for name in attributes:
            if name in current.written:
                return current, name
        waiting += [value for value in current.fields.values() if isinstance(value, Instance) and value.view]
    return None


def captured_states(holder: Instance, attribute: str, layers: int) -> Captured | None:
    """What the forward of ``holder`` keeps for the ids in ``attribute``; None when its form is not recognised."""
    view = holder.view
    if not isinstance(view, SourceClass):
        return None
    found = _forward_with_sites(view, attribute)
    if found is None:
        return None
    forward, sites = found
    ids = _as_ids(holder.fields[attribute])
    if ids is None:
        return None
    path = view.module_of(forward).path
    states: set[tuple[float, int]] = set()
    met: set[int] = set()
    crash = ""
    for site in sites:
        for moment, state, value in _visits(site, layers):
            if value not in ids:
                continue
            met.add(value)
            states.add((moment, state))
            if state == 0 and site.residual_required:
                crash = "the embedding output is added to a residual that does not exist yet (None)"
    order = tuple(state for _, state in sorted(states))
    lost = tuple(value for value in dict.fromkeys(ids) if value not in met)
    shown = next(site for site in sites if site.loop is not None)
    return Captured(order, lost, path, shown.line, shown.place, crash)


def _as_ids(value: object) -> list[int] | None:
    if not isinstance(value, (list, tuple, set)):
        return None
    ids = [item for item in value if isinstance(item, int)]
    return ids if len(ids) == len(value) else None


def _forward_with_sites(view: SourceClass, attribute: str) -> tuple[ast.FunctionDef, list[Site]] | None:
    functions = [node for part in view.lineage for node in part.node.body if isinstance(node, ast.FunctionDef)]
    functions.sort(key=lambda function: function.name != "forward")
    for function in functions:
        if function.name.startswith(("set_", "_set_", "__")):
            continue
        sites = list(_sites(view, function, attribute))
        if any(site.loop is not None for site in sites):
            return function, sites
    return None


def _sites(view: SourceClass, function: ast.FunctionDef, attribute: str) -> Iterator[Site]:
    loops = [node for node in ast.walk(function) if isinstance(node, ast.For) and _layer_call(node) is not None]
    for node in ast.walk(function):
        index = _tested_index(view, node, attribute)
        if index is None:
            continue
        expression, residual = index
        loop = next((loop for loop in loops if _inside(node, loop)), None)
        line = getattr(node, "lineno", function.lineno)
        if loop is not None:
            call = _layer_call(loop)
            assert call is not None
            place = "inside" if _inside(node, call) else "before" if line < call.lineno else "after"
            if expression is None:
                expression = _loop_index(loop)
            residual = residual or (place == "before" and _adds_residual(loop, node))
        elif loops:
            place = "ahead" if line < loops[0].lineno else "past"
        else:
            continue
        if expression is not None:
            yield Site(place, expression, loop, line, residual and place in ("before", "ahead"))


def _tested_index(view: SourceClass, node: ast.AST, attribute: str) -> tuple[ast.expr | None, bool] | None:
    """The expression tested against the ids, and whether the capture needs a residual; None when there is no test."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In):
        tested = node.comparators[0]
        if isinstance(tested, ast.Attribute) and tested.attr == attribute:
            return node.left, False
    if isinstance(node, ast.Attribute) and node.attr == _LAYER_MARK and isinstance(node.ctx, ast.Load):
        return None, False
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and name.value == _LAYER_MARK:
            return None, False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
        return _helper_index(view, node, node.func.attr, attribute)
    return None


def _helper_index(view: SourceClass, call: ast.Call, name: str, attribute: str) -> tuple[ast.expr, bool] | None:
    """The argument of ``self.HELPER(...)`` that the helper tests against the ids."""
    helper = view.method(name)
    if helper is None or name == "forward":
        return None
    parameters = [argument.arg for argument in helper.args.args][1:]
    for node in ast.walk(helper):
        found = _tested_index(view, node, attribute) if isinstance(node, ast.Compare) else None
        if found is None or not isinstance(found[0], ast.Name) or found[0].id not in parameters:
            continue
        position = parameters.index(found[0].id)
        given = {word.arg: word.value for word in call.keywords}.get(found[0].id)
        if given is None and position < len(call.args):
            given = call.args[position]
        if given is not None:
            return given, _unguarded_sum(helper)
    return None


def _visits(site: Site, layers: int) -> Iterator[tuple[float, int, int]]:
    """(moment, state, id that the test meets) for each time the test runs; moments order the captures."""
    evaluator = Evaluator(lambda name: {"start_layer": 0, "end_layer": layers}.get(name))

    def met(names: dict[str, object]) -> int | None:
        try:
            value = evaluator.value(site.index, names)
        except (Raised, Undecided):
            return None
        return value if isinstance(value, int) else None

    if site.loop is None:
        value = met({"self": Unknown("self")})
        if value is not None:
            yield (-1.0, 0, value) if site.place == "ahead" else (layers + 0.0, layers, value)
        return
    variable = _loop_index(site.loop)
    for i in range(layers):
        value = met({variable.id: i, "self": Unknown("self")}) if variable is not None else None
        if value is not None:
            state = i + 1 if site.place == "after" else i
            yield i + (0.5 if site.place == "after" else 0.0), state, value


def _loop_index(loop: ast.For) -> ast.Name | None:
    target = loop.target
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return target if isinstance(target, ast.Name) else None


def _layer_call(loop: ast.For) -> ast.Call | None:
    """The call of the decoder layer in a loop: of the loop's layer variable, or of ``self.layers[i]``."""
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)} | {"layer", "decoder_layer"}
    for node in ast.walk(loop):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in targets:
            return node
        if isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value).endswith("layers"):
            return node
    return None


def _inside(node: ast.AST, outer: ast.AST) -> bool:
    return any(part is node for part in ast.walk(outer))


def _adds_residual(loop: ast.For, test: ast.AST) -> bool:
    """Whether the ``if`` of a test keeps ``hidden_states + residual`` without asking whether there is a residual."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and _inside(test, node.test):
            return _unguarded_sum(ast.Module(body=node.body, type_ignores=[]))
    return False


def _unguarded_sum(tree: ast.AST) -> bool:
    sums = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and "residual" in ast.unparse(n)]
    guards = [n for n in ast.walk(tree) if isinstance(n, (ast.IfExp, ast.If)) and "None" in ast.unparse(n.test)]
    return bool(sums) and not guards
