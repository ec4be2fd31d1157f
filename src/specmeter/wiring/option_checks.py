"""What is asked of a check, before anything is read: numbers that no server has are refused by the option's name."""

from __future__ import annotations

from specmeter.errors import SpecmeterError
from specmeter.wiring.check import Pair

# Far above what any server is started with; draft steps, branches and verified tokens are in tokens of one cycle.
_RANGES: dict[str, tuple[int, int]] = {
    "steps": (0, 1000),
    "topk": (0, 1000),
    "draft_tokens": (0, 1_000_000),
    "tp": (1, 10_000),
    "draft_tp": (1, 10_000),
    "serve_context": (1, 1_000_000_000),
    "threads": (1, 10_000),
}


def check_options(**given: int | None) -> None:
    """SpecmeterError (exit 2) for an option, by its name in the parser, outside what a server can have.

    0 steps, branches or draft tokens pass: the check itself says what is wrong with them.
    """
    for name, value in given.items():
        low, high = _RANGES[name]
        if value is not None and not low <= value <= high:
            raise SpecmeterError(
                f"--{name.replace('_', '-')} is {value}.",
                f"It must be a whole number from {low} to {high:,}.",
                "Give what the server is started with, or leave it out.",
            )


def check_trained(pair: Pair, told: tuple[int, ...] | None) -> None:
    """SpecmeterError (exit 2) when ``--trained`` names states that this pair cannot have."""
    if told is None:
        return
    layers, takes = pair.target.layers or 0, pair.head.states
    why = ""
    if not all(0 <= k <= layers for k in told):
        why = f"The target has {layers} layers: its states are H[0], the embedding output, to H[{layers}]."
    elif len(set(told)) != len(told):
        why = "A state is named twice; engines capture each once."
    elif takes is not None and len(told) != takes:
        why = f"The head's fc takes {takes} state{'s' if takes != 1 else ''}, not {len(told)}."
    if why:
        raise SpecmeterError(
            f"--trained {','.join(map(str, told))} is not what the head was trained on.",
            why,
            "Name the states k of H[k], as --trained 3,16,28, or leave it out; --scan finds them by numbers.",
        )
