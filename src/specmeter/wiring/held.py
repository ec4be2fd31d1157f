"""What ids that a running process holds mean: its model's own loop over the layers decides."""

from __future__ import annotations

from collections.abc import Sequence

from specmeter.wiring import embedded_source, sglang_source, vllm_source
from specmeter.wiring.capture import captured_states, find_holder
from specmeter.wiring.evaluate import Evaluator
from specmeter.wiring.evaluate_values import Instance, Raised, Undecided
from specmeter.wiring.feed import default_states
from specmeter.wiring.from_source import HOLDERS, model_view
from specmeter.wiring.locate import Engine
from specmeter.wiring.shape import Shape
from specmeter.wiring.tree import SourceClass


def states_of_held(engine: Engine, target: Shape, held: Sequence[int]) -> tuple[int, ...] | None:
    """The k of H[k] that an engine captures while its model holds the ids ``held``; None where its source is unknown.

    The setter has run already in the process, so only the loop's test is evaluated: ids are taken as they lie there.
    """
    if engine.name == embedded_source.NAME:
        return tuple(held)
    view, setter = _view(engine, target)
    if view is None:
        return None
    model = Instance(view=view)
    function = view.method(setter)
    if function is None:
        return None
    layers = target.layers or 0
    # Any sound ids will do: the setter is run to see which object it puts them on.
    arguments: list[object] = [list(default_states(layers))] if len(function.args.args) > 1 else []
    try:
        Evaluator().call(function, [model, *arguments], {})
    except (Raised, Undecided):
        return None
    found = find_holder(model, HOLDERS)
    if found is None:
        return None
    holder, attribute = found
    holder.fields[attribute] = list(held)
    captured = captured_states(holder, attribute, layers)
    return None if captured is None else captured.states


def _view(engine: Engine, target: Shape) -> tuple[SourceClass | None, str]:
    if engine.tree is None:
        return None, ""
    if engine.name == "sglang":
        located = engine.tree.class_in("srt/models", target.architecture)
        setter = sglang_source.SETTER
    else:
        located = vllm_source.model_class(engine.tree, target.architecture)
        setter = vllm_source.SETTER
    return (None if located is None else model_view(engine.tree, located, target)), setter
