"""Checks of positions: rope parameters and the context length of the head against what is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specmeter.checkpoint.numbers import is_number
from specmeter.wiring.findings import Finding, error, note, warning
from specmeter.wiring.head import Head
from specmeter.wiring.shape import Shape

_ROPE_TYPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "su",
    "mrope",
    "deepseek_yarn",
    "proportional",
)


def check_positions(head: Head, target: Shape, served: int | None) -> list[Finding]:
    """Findings about rope and context length; ``served`` is the context length of the server in tokens, if known."""
    return [*_rope(head, target), *_context(head, target, served)]


def _rope(head: Head, target: Shape) -> Iterator[Finding]:
    theta, scaling = rope(head.config)
    if head.shape.head_dim and head.shape.head_dim % 2:
        yield error("rope", f"the head's head_dim {head.shape.head_dim} is odd: rotary embedding pairs dimensions")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_TYPES:
        yield error("rope", f"the head's rope type {kind!r} is none that engines know", cure="Correct rope_scaling.")
    elif (
        kind not in ("default", "mrope") and not isinstance(scaling.get("factor"), (int, float)) and kind != "longrope"
    ):
        yield error("rope", f"the head's rope scaling of type {kind} has no factor", cure="Correct rope_scaling.")
    theirs, their_scaling = rope(target.config)
    differs = []
    if theta is not None and theirs is not None and theta != theirs:
        differs.append(f"rope_theta {theta:g} against {theirs:g}")
    if _comparable(scaling) != _comparable(their_scaling):
        differs.append(f"rope scaling {_comparable(scaling) or 'none'} against {_comparable(their_scaling) or 'none'}")
    if differs:
        yield note(
            "rope",
            f"head and target differ in {' and '.join(differs)}",
            "A head has its own attention, so this is right if it was trained so, and lowers acceptance if not.",
            "Compare with the head's training config.",
        )


def rope(config: Mapping[str, object]) -> tuple[float | None, Mapping[str, object]]:
    """rope_theta and the scaling parameters of a config, in the old and the new spelling."""
    parameters = config.get("rope_parameters")
    scaling = parameters if isinstance(parameters, Mapping) else config.get("rope_scaling")
    table: Mapping[str, object] = scaling if isinstance(scaling, Mapping) else {}
    theta = config.get("rope_theta", table.get("rope_theta"))
    return (float(theta) if is_number(theta) else None), table


def _comparable(scaling: Mapping[str, object]) -> dict[str, object]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}
    return {"type": kind, "factor": scaling.get("factor")}


def _context(head: Head, target: Shape, served: int | None) -> Iterator[Finding]:
    own, theirs = head.shape.max_positions, target.max_positions
    if own is None:
        return
    if served is not None and served > own:
        yield error(
            "context-length",
            f"the head knows {own} positions, the server serves {served}",
            "Beyond its last position a head drafts badly: acceptance falls with length.",
            f"Serve at most {own} tokens with speculation, or use a head trained for longer contexts.",
        )
    elif served is None and theirs is not None and own < theirs:
        yield warning(
            "context-length",
            f"the head knows {own} positions, the target {theirs}",
            "Requests longer than the head's context accept less and less, without any message.",
            "Say what is served with --serve-context; beyond the head's length expect no gain.",
        )
